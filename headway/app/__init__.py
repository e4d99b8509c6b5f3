"""Application: puts a process together, starts it, and ends it in order.

roles         table of roles, and the parts of each
wiring        connects the parts of a process
runner        runs a process to its end
serving       `headway.serve`, for programs
background    a service in a thread of a program
python_target names of targets that are given as Python objects
brokers       chooses the broker
backends      chooses what runs batches
fallbacks     makes what a gateway asks while its broker is away
devices       says which GPU each worker sees
stores        chooses identity, key store and ledger
lifecycle     order of start and drain
signals       reactions to signals
banner        text that start-up prints
progress      line on a terminal while workers load
unused_keys   warning of keys that no setting asks for
"""
