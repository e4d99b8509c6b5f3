"""The production core under virtual time, and a planner that finds with it how many GPUs a load needs.

`scenario` the order · `batch_times` recorded run times · `traffic` the requests · `fleet` gateways, the queue, whole or in shards, and its
workers · `engine` the heap of instants that drives them · `record` what happened · `report` percentiles and shares of it, and their tables
`plot` pictures · `planner` the least number of GPUs · `day` the autoscaler through a day
"""
