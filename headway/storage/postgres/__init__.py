"""Ledger and API keys in PostgreSQL.

connection_pair     the way there: a connection that writes and one that asks
connection          one of those, made anew when a call on it failed
frames              the server's messages, looked at before the client library does
ledger, keys        requests, API keys
"""
