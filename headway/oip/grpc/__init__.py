"""The Open Inference Protocol over gRPC. Imported only if the gRPC port is on: protobuf is an extra."""
