"""The broker for a single process."""
