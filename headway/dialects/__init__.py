"""Dialects of remote batch APIs: pure functions from a batch to a request, and from an answer to results.

dialect     the base class of all dialects
table       each dialect by name, and the choice of one for a URL
json_lists  JSON lists of a known length

Each other module holds one dialect or two close relatives; those of the Open Inference Protocol are in `headway.oip`.
This module holds only their names, because that is all the settings need.
"""

AUTO = "auto"
"""Choose the dialect by the URL's scheme and path; `list` if those don't tell."""
NAMES = ("list", "inputs", "oip", "oip-grpc", "openai-completions", "openai-embeddings")
