"""Traces of a process on their way to a collector, by OpenTelemetry's protocol (OTLP).

environment   the standard variables OTEL_…
otlp          spans as bytes of the protocol
sender        what both ways of sending have in common
http_sender   OTLP over HTTP
grpc_sender   OTLP over gRPC
exporter      the thread that encodes and sends
"""
