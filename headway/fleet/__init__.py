"""Services that keep a fleet of processes together."""
