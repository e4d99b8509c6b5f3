"""What all services of a process use, such as loops, logs, counters, spans, TLS and listening sockets."""
