"""Traces of a process on their way to a collector, by OpenTelemetry's protocol (OTLP).

environment   the standard variables OTEL_…, as far as the SDK does not read them itself
sdk           our spans as OpenTelemetry's SDK has them, and its exporters
exporter      the thread that hands spans to such an exporter
"""
