"""What operators see of a process: its metrics."""
