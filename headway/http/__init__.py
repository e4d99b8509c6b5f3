"""The public port.

server      the listener and its connections, with what they may cost
inference   the inference routes, answered on the connection itself
public      the ordinary routes: health, tasks, the contract and its page
"""
