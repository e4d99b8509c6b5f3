"""OpenAI's API: what its clients send, and what they take for an answer.

errors         errors in its form
members        members of a body, and those that become parameters
routing        heads of its requests, and rate limits as its clients read them
completions    POST /v1/completions
chat           POST /v1/chat/completions
chat_template  chat messages to one text
answers        choices of completions, whole or as server-sent events
responses      POST /v1/responses
embeddings     POST /v1/embeddings
models         GET /v1/models
"""
