"""The HTTP/1.1 server: ports, connections, and limits on what a client can cost.

listener            one port: bind, open, retire, drain, close
connection          one client: its requests in order, and their answers
reader, writer      bytes to heads and bodies, answers to bytes; no I/O
connection_context  state that all connections of a port share
head                parser of request heads
hangups             clients that don't read their answers, or hang up
memory_listener     a port without a socket, for tests of targets
"""
