"""The broker over Redis (7.0 or later) or Valkey, for many processes on many machines.

broker             the Broker: claims for slots, replies to gateways, searches for entries and tasks, reaping
shard_router       queues that this process knows, the home shard of each slot, and the queue of each entry
shard_queue        one queue in the server, outcomes of its leases, and wake-ups of the idle slots of this process
steps              calls that expire with their callers' patience, and the server's clock
receipts           replies that gateways have read, until the server is told
large_values       inputs and outputs that are stored apart
fleet              workers, processes, leader, capacities
board              departure board
dead_letters       dead letters
wire, entry_wire   wire formats, and their version
codes              codes that this process shares with the functions in the server
lua/               the library of functions in the server. The first file lists all keys
function_library   puts the library together
connection         calls with a deadline, blocking reads, and the check of a server
together           calls of one moment, made as one
clients            makes clients from a URL: one server, Sentinel, Cluster, TLS
failover           planned failover to a replica
link               one connection to a server, and the client of one server
"""
