"""Listeners and connections, on which requests begin and end, and the bounds of their cost.

listener            a port: bind, open, retire, drain, close
connection          one client: its requests in order, and their answers
reader, writer      bytes to heads and bodies, without I/O; answers to bytes
connection_context  what the connections of a port share
head, chunks        parsers of heads and of chunked bodies
hangups             answers that clients do not take, and clients that leave meanwhile
memory_listener     a port without a socket, for tests of targets
"""
