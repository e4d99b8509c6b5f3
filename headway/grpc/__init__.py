"""The gRPC port: its connections, its calls, and the services on it.

Only `headway.app` imports what is in it, and only where the port is on: h2 and protobuf are an extra. No worker process does.
"""
