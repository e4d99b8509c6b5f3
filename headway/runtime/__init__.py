"""Parts that every service loop uses.

supervisor     keeps loops alive
periodic       calls a function at even intervals
race           waits of which the first that is over ends the others
timing_wheel   many deadlines, one timer
availability   logs an outage once when it begins and once when it ends
request_id     ids that sort by time
counters       plain counters of what happened
spans          spans of traces, until they are sent
log            log lines that never block
file_watcher   changes of files
memory_reuse   large blocks stay with the process
fair_turns     work on the event loop, and things under way at once, by turns of the tenants
folder_lock    turns at files that processes share
"""
