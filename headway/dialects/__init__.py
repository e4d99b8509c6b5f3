"""Dialects of remote batch APIs: pure functions that turn a batch into a request, and an answer into results.

The dialects of the Open Inference Protocol are in `headway.oip`. This module has only the names that the settings need.
"""

AUTO = "auto"  # Choose the dialect based on the URL's scheme and path. The default is `list`.
NAMES = ("list", "inputs", "oip", "oip-grpc", "openai-completions", "openai-embeddings")
