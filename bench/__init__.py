"""Benchmarks, grouped by what they ask; docs/benchmarks/README.md lists them."""
