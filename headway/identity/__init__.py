"""Who is asking: a package for each kind of credential.

principals   principals made from a credential's data, or one for everybody
api_keys     API keys, from a store or a file
jwt          JSON Web Tokens
combined     keys and tokens side by side
tables       TOML files that describe credentials
"""
