"""Who asks: one way of knowing per file. See also `headway.keyring`, which holds in memory what a store of keys says.

open          anybody
either        keys and tokens side by side
api_key       the text of an API key
keys_file     API keys in a TOML file
key_table     live API keys in memory, a million of them if need be
jwt           JSON Web Tokens
callers       what a credential's data make of its caller
"""
