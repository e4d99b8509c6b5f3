"""What docs/architecture.md says of additions, tried."""
