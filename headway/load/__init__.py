"""The open-loop load generator behind `headway bench`.

    spec        what to send: target, rate, arrivals, mix; checked when built
    schedule    due times of the requests, and an alarm accurate to well under a millisecond
    connection  keep-alive connections and a pool of them
    generator   sends requests when they are due, without waiting for answers; each gets exactly one outcome
    record      outcomes as they come, cheap to write
    report      percentiles and rates, made from the record; and progress while it runs

Latency counts from when a request was *due*. So a server that stalls cannot hide the requests that it kept from being sent
(coordinated omission; Gil Tene, "How NOT to Measure Latency").
"""
