"""Traces of a process on their way to a collector, through OpenTelemetry's SDK."""
