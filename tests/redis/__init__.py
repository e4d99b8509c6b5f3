"""The Redis broker on real servers: tests that don't apply to every broker."""
