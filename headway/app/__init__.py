"""The application: puts a process together, starts it, and ends it in order.

roles         the roles and the parts of each
wiring        connects the parts of a process
runner        runs a process to its end, with a progress line while workers load
serving       `headway.serve`, for programs
background    a service in a thread of a program
python_target targets given as Python objects
brokers       chooses the broker
backends      chooses what runs batches
devices       chooses the GPU of each worker
stores        chooses identity, key store and ledger; warns of unused keys
lifecycle     order of start and drain
signals       reactions to signals
banner        text printed at start-up
"""
