"""The broker over Redis (7.0 or later) or Valkey, for many processes on many machines.

broker             the Broker: claims for slots, replies to gateways, lookups of entries and tasks, reaping
shard_router       queues that this process knows, the home shard of each slot, and the queue for each entry
shard_queue        one queue in the server, completions of its leases, and wake-ups for this process's idle slots
claims             claims from one queue
entry_records      states and outcomes of one queue's entries
steps              calls that the server skips once their callers have stopped waiting, and the server's clock
receipts           replies that gateways have read, until this is reported to the server
large_values       inputs and outputs that are stored separately
fleet              workers, processes, leader, capacities
board              departure board
dead_letters       dead letters
wire, entry_wire   wire formats, and their version
codes              codes that this process shares with the functions in the server
lua/               the function library in the server. The first file lists all keys
function_library   assembles the library
connection         calls with a deadline, and the check of a server
blocking_reads     blocking reads of lists and streams
memory_watch       the servers' memory use and eviction policy
together           batches calls made at about the same time into one
clients            creates clients from a URL: one server, Sentinel, Cluster, TLS
failover           planned failover to a replica
link               one connection to a server, and the client of one server
"""
