"""A checker that knows what every request is promised: tasks, ids used again, idempotency keys, several tenants.

    operation.py    plain data: what clients did, what the model function ran, what was done to the service
    faults.py       what each fault may cost
    search.py       which histories of one object are allowed: a search through all orders of effects
    ids.py keys.py  the two objects: an id of a tenant, an idempotency key of a tenant
    versions.py charges.py bulk.py drains.py parameters.py
                    laws of one subject each: versions of a model, limits, bulk jobs, workers that are drained, parameters of a call
    ledger.py counts.py letters.py at_rest.py warnings.py idle.py
                    laws of what the service itself gives as evidence, one kind each
    bareness.py     times in which there may be nobody for something
    evidence.py     plain data of that evidence, which `bench/promises/collecting.py` collects
    checker.py      judges a whole history
    requests.py     how an operation is written as a request
    ways_in.py      how each way into the service writes a request and tells an answer
    calls.py        calls to the gRPC port, told as those of HTTP
    crowd.py        many clients that ask, leave, ask again, poll and delete, and note all of it
    client.py       one connection of theirs
    look_up.py journal.py
                    readers of a ledger, of a gateway's statuses, and of what ran

All but crowd, client, calls and the readers are pure: no clock, no dice, no input or output. `bench/promises/chaos.py` uses all of it.
"""
