"""The gRPC port: its connections, its calls, and the services on it.

Only `headway.app` imports what is in it, and only where the port is on: grpcio is an extra. No worker process does.
"""

from headway.runtime.quiet_grpc import import_quietly

import_quietly()
