"""The Open Inference Protocol, version 2.

`rest` and `grpc` serve it. The dialects call remote servers that speak it. All other modules are shared by both.
"""
