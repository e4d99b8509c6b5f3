"""Services that keep a fleet of processes together.

membership         a process's place in the fleet: heartbeats and farewell pace               how often a process reports and reads
models             the models that the fleet's workers bring reaper             expires and requeues what is overdue board_reporter
posts what a process does to the departure board local_scaling      resizes the worker pools of this process
"""
