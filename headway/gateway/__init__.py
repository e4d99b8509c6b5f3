"""The client's side of a request.

gateway            takes requests, and answers each once
pending            pending requests, their sinks and observers
deadlines          ends requests at their deadline
lane               decisions shared by alike requests
served_models      the served models, each a served_model with its version_choice
fan_out            requests with several inputs: a part for each, and one outcome
equal_inputs       runs equal inputs of one request once
broker_session     session with one broker
outbox             entries that wait for a call to the broker
limiter            rate limits, and the throttle by the fleet's capacity
client_quotas      bounds what a tenant holds of connections, bodies and answers
fleet_watchers     follow the fleet's workers and capacity
direct_mode        answers while the shared broker is out of reach
input_gate         applies the input policy
judge              runs a policy's function in processes of its own
outcome_counts     counts outcomes
request_log        remembers the last requests, and writes the access log
ledger_writer      records requests in the ledger
request_traces     spans of requests, including refused ones
"""
