"""Autoscaler: how many workers a model should have. Pure: the controller acts on it.

rules     conditions that must hold for a time, as an operator writes them
sizing    the fewest slots that keep a promise, by a formula
forecast  arrivals: how many, how uneven, and how many soon
shares    each process's part of a model's workers, and each model's part of a process
scaler    the number of workers, from measurements
"""
