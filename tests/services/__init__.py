"""Services and doors under virtual time."""
