"""Identity of callers: a package for each kind of credential.

principals   principals made from a credential's data, or one for everybody; keys and tokens side by side
api_keys     API keys, from a store or a file
jwt          JSON Web Tokens
tables       TOML files that describe credentials
"""
