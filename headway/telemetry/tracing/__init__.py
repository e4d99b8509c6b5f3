"""Traces of a process on their way to a collector, through OpenTelemetry's SDK.

environment   the standard variables OTEL_… that the SDK doesn't read itself
exporter      the thread that sends spans through the SDK
"""
