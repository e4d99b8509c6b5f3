"""Databases of the ledger and of API keys.

schema       tables of the database, step by step
key_rows     an API key as a row
sqlite       an SQLite file
postgres     a PostgreSQL
"""
