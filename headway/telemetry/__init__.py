"""Metrics of a process, for operators."""
