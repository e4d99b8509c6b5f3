"""Databases that keep the ledger, API keys and bulk jobs.

schema      tables, and the migrations that create them
rows        SQL and rows shared by both databases
sqlite      an SQLite file
postgres    a PostgreSQL server
"""
