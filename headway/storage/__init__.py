"""Databases that keep the ledger, API keys and bulk jobs.

schema                              tables, and the steps that make them
key_rows, bulk_rows, open_rows      SQL and rows that both databases share
sqlite                              an SQLite file
postgres                            a PostgreSQL server
"""
