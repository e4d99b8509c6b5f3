"""Code that HTTP and gRPC share: reading requests and writing answers.

entrance            authentication, rate limits, charging, and the way into the gateway
fields              options, id and trace context from header fields or gRPC metadata
exchange            one request between its decoded body and its answer
bodies              decoders and checks of JSON bodies
answer_pieces       large answers, made and sent piece by piece in turns of the event loop
rate_limit_headers  RateLimit header fields
readiness           whether this process should get traffic
"""
