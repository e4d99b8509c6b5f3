"""Where entries wait: one broker, one file."""
