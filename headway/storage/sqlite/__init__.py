"""Ledger, API keys and bulk jobs in an SQLite file.

database              the file, with a thread that writes and a thread that reads
connection_thread     such a thread with its connection
ledger, keys, bulk    the stores
"""
