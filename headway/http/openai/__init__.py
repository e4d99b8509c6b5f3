"""OpenAI's API.

completions  POST /v1/completions
chat         POST /v1/chat/completions, and chat templates
answers      answers of both, as JSON or as server-sent events
responses    POST /v1/responses
embeddings   POST /v1/embeddings
bulk         /v1/files and /v1/batches
bulk_lines   lines of batch files
members      members of request bodies
errors       errors in OpenAI's form
"""
