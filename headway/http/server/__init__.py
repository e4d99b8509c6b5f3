"""Listeners and connections: where requests begin and end, and what they may cost."""
