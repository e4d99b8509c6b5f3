"""A remote API over gRPC, for which the extra `grpc` is needed."""

from headway.runtime.quiet_grpc import import_quietly

import_quietly()
