"""Ledgers: where requests are recorded and API keys are kept, one database per file.

schema                        what is in the database, step by step
sqlite_file, postgres_link    the way there, and its steps up to date
sqlite_ledger, postgres_ledger    requests
sqlite_keys, postgres_keys    API keys
"""
