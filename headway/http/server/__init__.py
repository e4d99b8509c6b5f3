"""Listeners and connections, on which requests begin and end, and the bounds of their cost."""
