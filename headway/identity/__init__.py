"""Who asks: adapters of the Identity port, one way of knowing per file."""
