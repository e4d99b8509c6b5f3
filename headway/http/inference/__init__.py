"""Inference routes, answered on the connection itself.

fast_path        a connection of the public port, from its bytes to the request in hand
request_in_hand  one request, from its head to the gateway and back to its answer
routes, codecs   the codec of each route; the native codecs
inference_head   what a head says about its request, and heads that repeat
octets           bodies and answers that are the value itself
incoming_bodies  large and compressed bodies
cross_origin     CORS
context          state that all connections of the port share
"""
