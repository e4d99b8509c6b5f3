"""The Open Inference Protocol, version 2.

What all that speak it have in common, over HTTP and over gRPC

tensors      tensors of BYTES: their shape, and their elements in the binary form
inputs       inputs of a model that takes tensors of any datatype: checks, and the one value that they become
outputs      outputs of a model that gives tensors, as an answer tells them
parameters   parameters of a request: those that the protocol knows, and those for the target
metadata     what is said of the server and of its models, and their statistics

Its wire forms

rest         requests and answers of the port over HTTP
grpc         messages and calls of the gRPC port
dialect, dialect_rest, dialect_grpc
             requests to remote APIs that speak it, and their answers
"""
