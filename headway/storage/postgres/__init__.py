"""Ledger, API keys and bulk jobs in PostgreSQL.

database              connections to the server, and the tables
ledger, keys, bulk    the stores
"""
