"""The gRPC port: its connections, its calls, and the services on it. Only `headway.app` imports this package, and only where the
port is on, because h2 and protobuf are an extra."""
