"""A remote API over gRPC, for which the extra `grpc` is needed."""
