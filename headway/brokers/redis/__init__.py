"""The broker over Redis (7.0 or later) or Valkey: the same laws, for many processes on many machines.

broker             the Broker: it deals entries out, claims for slots, and asks all queues at once

One queue
shard_queue        one queue in the server: a model's, or one shard of it
steps              calls of the library, each done while somebody waits for it, and the server's clock
completion         outcomes of a lease on their way into the server, and bounds on their bytes
receipts           what gateways have read, of which the server is yet to hear
wakeups            wake-ups of the idle slots of this process
large_values       inputs and outputs that are stored apart

All queues
queue_table        queues that this process knows, made when they are heard of, and forgotten again
shard_router       the home shard of each slot, and the queue that each entry is offered to
lookup             where an entry or a task is, and which model a task's id belongs to
mailbox            replies to the gateways of this process
reaping            each queue reaped when its server wants it

The rest of the fleet
fleet              workers, processes, leader, capacities
board              departure board
dead_letters       dead letters

What is stored
wire, entry_wire   wire formats, and their version
codes, figures     codes and layouts that this process and the functions have in common
lua/               the library of functions in the server: every atomic step; its first file lists every key
function_library   that library put together

The server
connection         calls with a deadline, blocking reads, and what is demanded of a server
together           calls of one moment, made as one
blocking           blocking reads of several keys at once
clients            clients made from a URL: one server, Sentinel, Cluster, TLS
cluster            client of a Redis Cluster: which node has a key
sentinels          Sentinels, asked for the primary, and listened to for failovers
failover           planned failover to a replica
server             client of one server
link               one connection to it
"""
