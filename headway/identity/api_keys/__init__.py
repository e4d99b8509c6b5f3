"""API keys: their text, a file of keys, and the cache for keys of any store."""
