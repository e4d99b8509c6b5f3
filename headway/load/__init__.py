"""Open-loop load generator of `headway bench`. Latency is measured from the time at which a request was *due*, so a stalled
server cannot hide how long requests waited to be sent (coordinated omission; Gil Tene, "How NOT to Measure Latency")."""
