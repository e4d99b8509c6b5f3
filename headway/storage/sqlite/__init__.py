"""Ledger and API keys in an SQLite file.

database            the file: a thread that writes and one that reads
connection_thread   one of those threads, with its connection
file_identity       identity of the file at the path
ledger, keys        requests, API keys
"""
