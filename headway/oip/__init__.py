"""The Open Inference Protocol, version 2.

What its wire forms share:

tensors      tensors of BYTES: shapes, and elements in the binary form
inputs       inputs of models that take tensors: checks, and packing into one value
outputs      outputs of models that give tensors
parameters   request parameters: those that the protocol defines, and those for the target
metadata     metadata and statistics of the server and its models

Its wire forms:

rest         requests and answers over HTTP
grpc         messages and calls over gRPC
dialect, dialect_rest, dialect_grpc
             requests to remote APIs that speak the protocol, and their answers
"""
