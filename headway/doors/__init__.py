"""Reading of requests and writing of answers, as far as HTTP and gRPC share it.

entrance            who asks, whether its limits let it, what it is charged, and the way into the gateway
fields              options, id and trace in header fields, or in metadata of the same names
exchange            what every body and message is read to, and what its answer is written from
bodies              decoders and checks of bodies in JSON
tensor_bodies       arrays of JSON, as a model that takes tensors gets them
answer_pieces       pieces of large outputs
large_answers       answers that are made and sent in turns
rate_limit_headers  fields by which clients learn of their limits
readiness           whether this process should get traffic
"""
