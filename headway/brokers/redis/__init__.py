"""The broker over Redis (7.0 or later) or Valkey, for many processes on many machines.

broker             the Broker, which deals entries out, claims for slots, and asks all queues at once

One queue
shard_queue        one queue in the server: a model's only queue, or one shard of several
steps              calls of the library that expire with their callers' patience, and the server's clock
completion         the outcomes of a lease on their way to the server
receipts           replies that gateways have read, until the server is told
wakeups            wake-ups of the idle slots of this process
large_values       inputs and outputs that are stored apart

All queues
queue_table        queues that this process knows
shard_router       the home shard of each slot, and the queue of each entry
lookup             search for an entry or a task, and claims of task ids by models
mailbox            replies to a gateway of this process
reaping            reaps each queue when its server asks for it

The rest of the fleet
fleet              workers, processes, leader, capacities
board              departure board
dead_letters       dead letters

What is stored
wire, entry_wire   wire formats, and their version
codes, figures     codes and layouts that this process shares with the functions in the server
lua/               the library of functions in the server. The first file lists all keys
function_library   puts the library together

The server
connection         calls with a deadline, blocking reads, and the check of a server
together           calls of one moment, made as one
blocking           blocking reads of several keys at once
clients            makes clients from a URL: one server, Sentinel, Cluster, TLS
cluster            client of a Redis Cluster
sentinels          Sentinels, which name the primary and announce failovers
failover           planned failover to a replica
server             client of one server
link               one connection to a server
"""
