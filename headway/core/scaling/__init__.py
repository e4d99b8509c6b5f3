"""Rules of the autoscaler: how many workers a model should have. Pure: the controller carries it out.

rules     conditions held for a time, as an operator writes them
sizing    the fewest slots that keep a promise, by a formula
forecast  arrivals: how many, how unevenly, and how many soon
rooms     the most workers of each of several models that have the same places by turns
shares    each process's part of the number
scaler    the number of workers, from what is measured
"""
