"""The broker over Redis (7.0 or later) or Valkey: the same laws, for many processes on many machines.

clients.py   from a URL to connections: one server, Sentinel, TLS
cluster.py   a Redis Cluster: which node has a key
server.py    one server
link.py      calls with a deadline, blocking reads, and what is demanded of a server
lua/         the library of functions in the server: every atomic step, with every key listed on top of its first file
library.py   that library put together
wire.py      what is written into the server, and its version
queue.py     one queue in the server: a model's, or a shard's of it
bell.py      how idle slots of this process are woken
mailbox.py   replies to the gateways of this process
broker.py    the Broker made of them
letters.py   dead letters
places.py    which shard is whose
registry.py  workers
fleet.py     members, leader, capacities
"""
