"""API keys: their format, a store in a file, and a cache for any store. The cache looks up the key of each request."""
