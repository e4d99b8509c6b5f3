"""The production core under virtual time, and a planner that finds with it how many GPUs a load needs.

scenario      what to simulate; checked when built traffic       the requests batch_times   recorded run times of batches fleet
gateways, the queue (whole or in shards) and workers engine        the heap of events that drives them record        what happened
report, plot  percentiles and shares of it, as tables and pictures planner       the least number of GPUs day           the
autoscaler through a day
"""
