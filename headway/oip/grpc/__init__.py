"""The Open Inference Protocol over gRPC. Imported only if the gRPC port is enabled, because protobuf is an extra."""
