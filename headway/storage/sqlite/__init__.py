"""Ledger, API keys and bulk jobs in an SQLite file.

database              the file: one thread writes, another reads
connection_thread     such a thread with its connection
ledger, keys, bulk    what is kept there
"""
