"""API keys.

credential   the text of a key
file         keys in a TOML file
table        live keys in memory, a million of them if need be
cache        holds in memory what a store of keys says
"""
