"""The gRPC port. Only `headway.app` imports this package, and only if the port is enabled, because h2 and protobuf are an extra."""
