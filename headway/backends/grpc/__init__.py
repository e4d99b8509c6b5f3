"""A remote API over gRPC, for which the extra `grpc` is needed."""

from headway.runtime.logger import import_grpc_quietly

import_grpc_quietly()
