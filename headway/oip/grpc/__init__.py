"""The Open Inference Protocol over gRPC. Imported only if the gRPC port is on, because protobuf is an extra."""
