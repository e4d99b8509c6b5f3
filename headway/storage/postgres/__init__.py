"""Ledger and API keys in PostgreSQL.

connection_pair     connection to the server: one that writes and one that asks
connection          one of those, made anew when a call on it failed
ledger, keys        requests, API keys
"""
