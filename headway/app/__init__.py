"""Puts a process together, starts it, and ends it in order.

roles         the table of roles, and what each has
wiring        connects the parts of a process
runner        runs a process to its end
brokers       chooses the broker
backends      chooses what runs batches
access        chooses what says who may ask, and where keys and records are stored
lifecycle     the order of start and drain
signals       what a process makes of signals
banner        what start-up prints
unused_keys   warns of keys that nobody is asked for
"""
