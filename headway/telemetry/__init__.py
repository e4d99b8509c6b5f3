"""Metrics and traces of a process, for operators."""
