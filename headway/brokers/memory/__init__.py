"""The broker inside one process."""
