"""The open-loop load generator behind `headway bench`.

    spec        order for a load test: target, rate, arrivals, mix; checked when built
    schedule    due instants of the requests (from `core.arrivals`, and trace files)
    answer      reads an HTTP answer of any form
    connection  keep-alive connection: one request, one answer at a time
    pool        connections, opened when wanted
    alarm       wakes the loop at an instant, to well under a millisecond
    generator   sends requests when they are due, never waiting for answers; each request gets one outcome
    progress    one line now and then while it runs
    record      outcomes as they come, cheap to write
    report      percentiles and rates, made from the record when all is over

Latency is counted from the instant a request was *due*, so a server that stalls cannot hide the requests it kept from
being sent (coordinated omission; Gil Tene, "How NOT to Measure Latency").
"""
