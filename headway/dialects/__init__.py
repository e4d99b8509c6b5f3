"""Dialects of remote APIs that take batches: pure functions from a batch to a request, and from an answer to items.

dialect     what a dialect is
table       each dialect by its name, and the one that an API is spoken to in
json_lists  lists of exactly so many elements, out of JSON that may be anything

Each other module is one dialect, or several that differ in a word; those of the Open Inference Protocol are in `headway.oip`.
Each has its line in `table`. The names alone are here, as settings need these and no more.
"""

AUTO = "auto"
"""Name that stands for the dialect which the URL's scheme or path tells, and for `list` if they tell none."""
NAMES = ("list", "inputs", "oip", "oip-grpc", "openai-completions", "openai-embeddings")
"""Names of all dialects."""
