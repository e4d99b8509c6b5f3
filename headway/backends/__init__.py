"""Ways to the black box: one kind, one file."""
