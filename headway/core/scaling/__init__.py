"""Rules of the autoscaler: how many workers a model should have. Pure: the controller carries it out.

rules     conditions held for a time, as an operator writes them
sizing    the fewest slots that keep a promise, by a formula
forecast  arrivals: how many, how unevenly, and how many soon
scaler    the number of workers, from what is measured
"""
