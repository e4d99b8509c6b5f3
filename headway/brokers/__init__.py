"""Brokers, in which entries wait: in this process (`memory`), or in a server that many processes share (`redis`)."""
