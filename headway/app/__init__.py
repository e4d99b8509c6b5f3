"""The application: builds a process, starts it, and shuts it down in order.

roles         the roles, and the parts of a process in each role
wiring        connects the parts of a process
runner        runs a process until a signal ends it
serving       `headway.serve`, for programs, with targets given as Python objects
brokers       chooses the broker
backends      chooses what runs batches
devices       chooses the GPU of each worker
stores        chooses identity, key store and ledger
lifecycle     starts and stops the parts in order
banner        text printed at start-up
"""
