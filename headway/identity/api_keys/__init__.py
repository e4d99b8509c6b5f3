"""API keys: their text, their stores, and a cache of them.

credential   text of a key
file         keys in a TOML file
cache        keys of a store, held in memory
table        the cache's memory, with room for a million keys
"""
