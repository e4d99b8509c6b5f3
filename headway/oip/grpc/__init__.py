"""The Open Inference Protocol over gRPC: messages of inference, its stream, and what is said of models.

Imported where the gRPC port is on: protobuf is an extra.
"""
