"""Benchmarks, grouped by the question they answer; docs/benchmarks/README.md lists them."""
