"""The open-loop load generator behind `headway bench`.

Latency counts from when a request was *due*. So a server that stalls cannot hide the requests that it kept from being sent
(coordinated omission; Gil Tene, "How NOT to Measure Latency")."""
