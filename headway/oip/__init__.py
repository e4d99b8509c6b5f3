"""The Open Inference Protocol, version 2, as far as all that speak it have it in common, over HTTP and over gRPC.

tensors      tensors of BYTES: their shape, and their elements in the binary form
elements     elements from values and to values, by what a model takes and gives
inputs       inputs of a model that takes tensors of any datatype: checks, and the one value that they become
outputs      outputs of a model that gives tensors, as an answer tells them
parameters   parameters of a request: those that the protocol knows, and those for the target
metadata     what is said of the server and of its models
statistics   statistics of a model, from the counters
"""
