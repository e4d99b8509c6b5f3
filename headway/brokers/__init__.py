"""Brokers, where entries wait: in this process (`memory`), or in a server shared by many processes (`redis`)."""
