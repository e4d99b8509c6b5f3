"""Ledger, API keys and bulk jobs in PostgreSQL.

database              connections to the server, and the tables
ledger, keys, bulk    what is kept there
"""
