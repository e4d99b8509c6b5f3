"""The inference routes, answered on the connection itself.

fast_path           a connection of the public port: from its bytes to the request in hand
request_in_hand     one request: from its head to the gateway, and back
routes, codecs      the codec of each route; the native ones
inference_head      what a head says of a request, and how it is known again
target              target of a request, and what opens its head
octets              bodies and answers that are the value itself
body_receiver, compressed_bodies  bodies that come in pieces, or packed
async_handoff, prefer_header      requests whose clients take the id of a task for an answer
cross_origin        header lines for pages of other sites that may ask
"""
