"""Where requests are recorded and API keys are kept.

schema       what is in the database, step by step
key_rows     an API key as a row
sqlite       an SQLite file
postgres     a PostgreSQL
"""
