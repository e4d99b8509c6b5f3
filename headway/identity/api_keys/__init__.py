"""API keys: their text, their stores, and a cache of them.

credential   text of a key
file         keys in a TOML file
table        live keys in memory, a million of them if need be
cache        keys of a store, held in memory
"""
