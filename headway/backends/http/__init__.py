"""A remote API that takes batches."""
