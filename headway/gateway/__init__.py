"""The client's side of a request.

gateway            takes requests in, and answers each once
pending            pending requests: their table, their sinks, how they end, who observes that
served_models      the models that are served, and what requests for each go by
workers_watcher    tells all who go by it what workers report
outcome_counts     counts the outcomes of requests
broker_session     dealings with one broker: what goes out, and what comes back
resubmitter        offers again what a broker may have lost
outcome_reader     reads the outcomes of tasks from the broker
limiter            refuses by rate
capacity_watcher   reads the fleet's capacity
direct_mode        the gateway's own broker and workers, and what they answer while the shared broker is away
ledger_writer      records outcomes in the ledger
access_log         logs requests, all or a share
request_traces     spans of sampled requests
refusal_traces     spans of requests that a port refuses
screened           way of requests through the input policy
input_gate         the input policy, carried out
judge              a function of the input policy, in processes of its own
fan_out            requests with several inputs: a part for each, and one outcome for all
lane               requests that ask alike and for nothing rare
client_quotas      what one tenant may hold of connections, bodies and answers
recent_requests    the last requests that were answered
"""
