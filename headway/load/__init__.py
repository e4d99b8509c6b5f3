"""Open-loop load generator of `headway bench`.

Latency counts from the time at which a request was *due*. So a stalled server cannot hide how long requests waited to be sent
(coordinated omission; Gil Tene, "How NOT to Measure Latency")."""
