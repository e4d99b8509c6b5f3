"""The broker over Redis (7.0 or later) or Valkey: the same laws, for many processes on many machines.

clients            clients made from a URL: one server, Sentinel, Cluster, TLS
cluster            client of a Redis Cluster: which node has a key
sentinels          Sentinels, asked for the primary
server             client of one server
link               one connection to it
connection         calls with a deadline, blocking reads, and what is demanded of a server
lua/               the library of functions in the server: every atomic step; its first file lists every key
function_library   that library put together
wire               wire format of what is stored, and its version
shard_queue        one queue in the server: a model's, or one shard of it
shard_router       the shard of each slot and of each entry
wakeups            wake-ups of the idle slots of this process
mailbox            replies to the gateways of this process
completion         bound on the outputs of one completion
loads              load of a queue that is cut into shards
rate_limit_cache   rate-limit debts that this process has heard of
broker             the Broker made of them
letters            wire format of dead letters
dead_letters       dead letters
registry           worker registry
fleet              processes, leader, capacities
"""
