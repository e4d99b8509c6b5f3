"""The client's side of a request.

gateway            takes requests in, and answers each once
pending            requests that are held: the table of them, their sinks, how they end, who observes that
outcome_counts     counts what became of requests
broker_session     what goes to a broker, and what comes back
resubmitter        offers again what a broker may have lost
outcome_reader     asks the broker what became of tasks
limiter            refuses by rate
capacity_watcher   hears what the fleet can carry
fallback           the gateway's own broker and worker, while the shared broker is away
ledger_writer      records outcomes in the ledger
recent_requests    the last requests that were answered
"""
