"""A checker for what the service promises: tasks, reused ids, idempotency keys, and several tenants.

    operation.py    plain data: what clients did, what the model function ran, what was done to the service
    faults.py       what each fault may cost
    search.py       decides whether the history of one object is allowed, by searching all orders of effects
    ids.py keys.py  the two objects: a tenant's id, and a tenant's idempotency key
    versions.py charges.py bulk.py drains.py parameters.py
                    rules about model versions, limits, bulk jobs, drained workers, and call parameters
    ledger.py counts.py letters.py at_rest.py warnings.py idle.py
                    rules about the evidence that the service itself gives, one kind each
    bareness.py     times when nothing may be available to serve a version
    evidence.py     plain data of that evidence, which `bench/promises/collecting.py` collects
    checker.py      judges a whole history
    requests.py     writes an operation as a request
    ways_in.py      how each API writes a request and reads an answer
    calls.py        gRPC calls, with their answers translated to HTTP
    crowd.py        many clients that send, disconnect, retry, poll and delete, and record all of it
    client.py       one of their connections
    look_up.py journal.py
                    read a ledger, a gateway's statuses, and the journal of what ran

All but crowd, client, calls and the readers are pure: no clock, randomness or I/O. `bench/promises/chaos.py` uses all.
"""
