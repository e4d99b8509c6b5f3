"""The Redis broker on real servers: what the contract suites cannot ask of every broker."""
