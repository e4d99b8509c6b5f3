"""Dialects of remote batch APIs: pure functions from a batch to a request, and from an answer to results.

The dialects of the Open Inference Protocol are in `headway.oip`. This module has only names, for the settings.
"""

AUTO = "auto"
"""Choose the dialect by the URL's scheme and path. The default is `list`."""
NAMES = ("list", "inputs", "oip", "oip-grpc", "openai-completions", "openai-embeddings")
