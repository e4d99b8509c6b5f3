"""The Open Inference Protocol, version 2.

`rest` and `grpc` serve it, and the dialects call remote servers that speak it. The other modules are shared.
"""
