"""Parts that every service uses: event loops, logs, counters, spans, TLS, listening sockets."""
