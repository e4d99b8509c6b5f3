"""What all benchmarks share: servers, load generators, findings."""
