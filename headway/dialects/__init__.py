"""Dialects of remote batch APIs: pure functions from a batch to a request, and from an answer to results.

The dialects of the Open Inference Protocol are in `headway.oip`. This module has only the names, as settings need no more.
"""

AUTO = "auto"
"""Choose the dialect by the URL's scheme and path, or `list` if those don't tell."""
NAMES = ("list", "inputs", "oip", "oip-grpc", "openai-completions", "openai-embeddings")
