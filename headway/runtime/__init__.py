"""Parts that all services use.

supervisor      keeps loops alive
periodic        ticks, and loops that call a function at every tick
race            ends tasks
fair_turns      lets tenants take turns on the event loop
availability    logs the beginning and end of an outage
counters        counters, and the log of departures
spans           spans of traces, until they are exported
log             log lines that never block
logger          loggers, and imports of structlog and gRPC that suit them
listening       listening sockets of ports
tls_transport   TLS of ports
certificates    certificates of ports and remote APIs
protocol_hints  log lines about clients that use the wrong protocol
request_id      ids that sort by time
shared_files    watches files, and locks folders
memory_reuse    keeps large blocks of memory with the process
"""
