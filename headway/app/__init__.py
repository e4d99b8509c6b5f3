"""Puts a process together, starts it, and ends it in order.

wiring        chooses adapters and the parts of a role
access        chooses what says who may ask, and where keys and records are stored
lifecycle     the order of start and drain
signals       what a process makes of signals
banner        what start-up prints
unused_keys   warns of keys that nobody is asked for
"""
