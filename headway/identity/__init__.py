"""Who asks: one way of knowing per package or file.

anonymous    anybody
api_keys     API keys, from a store or a file
jwt          JSON Web Tokens
combined     keys and tokens side by side
principals   what a credential's data make of its caller
"""
