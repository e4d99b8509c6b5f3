"""Headway turns single inference requests into full batches for scarce GPUs, and returns each answer to its caller.

These names are for programs. Headway imports each on first use, so `import headway` takes no time:

    headway.serve          serves a function or a class, as `headway serve` does
    headway.Client         client of a running service; headway.AsyncClient for asyncio
    headway.client         the clients' results, tasks and errors
    headway.Output         output of a target with the number of tokens that it used
    headway.testing        runs a target with the real batcher, for tests

These are the packages. A package imports only from packages below it in this list; a test checks this.

    cli          the commands, one file each
    testing      runs a target with the real batcher, for tests of targets
    app          builds a process for its role, starts it, and shuts it down in order; only this package chooses adapters
    admin        the admin port of every process
    http         the HTTP door: the public port with its listener, connections and routes
    grpc         the gRPC door
    doors        code that both doors share: admission of requests, reading, large answers, readiness
    telemetry    metrics, all named in one place, and the export of traces
    simulator    the production policies in virtual time
    load         the load generator
    bulk         bulk jobs: files of requests in, files of answers out
    gateway      the client's side: accepts a request and holds it until its answer comes, even while the broker is down
    worker       the batcher, one for each GPU: claims a batch, runs it, reports its outputs
    controller   publishes the capacity of the workers
    fleet        membership of the processes, and recovery of expired leases
    brokers      queues of waiting entries, in memory or in Redis
    backends     run batches on the target, in a child process or a remote API
    identity     authentication by API key or JSON Web Token, and the rights of callers
    input_policy rules on inputs, read from a file, and the search for patterns
    storage      SQLite and PostgreSQL: the ledger and the keys
    runtime      shared by all event loops: supervision, periods, deadlines, counters, the log
    ports        the Protocols between services and adapters (not TCP ports)
    protos       gRPC messages, in a separate descriptor pool
    oip          the Open Inference Protocol: code that its REST and gRPC forms share; the forms import the ports
    config       all settings, and the target to serve
    client       clients of a running service, for programs; imports no package of the service
    core         the rules, as pure functions: forming batches (`queue`), fair queueing, admission, retries
    model        plain data types
    v1           code that protoc generated from our .proto file, for programs
    errors       the tree of errors
    version      the version
"""

from typing import TYPE_CHECKING

from headway.version import __version__

if TYPE_CHECKING:
    from headway import testing as testing
    from headway.app.serving import BackgroundService, serve
    from headway.client import AsyncClient, Client
    from headway.model import Output

__all__ = ["AsyncClient", "BackgroundService", "Client", "Output", "__version__", "serve"]

if not TYPE_CHECKING:  # With it, mypy would accept any name.

    def __getattr__(name):
        """Import a name for programs on first use."""
        if name in ("AsyncClient", "Client", "client"):
            import headway.client

            return headway.client if name == "client" else getattr(headway.client, name)
        if name == "Output":
            from headway.model import Output

            return Output
        if name == "testing":
            import headway.testing

            return headway.testing
        if name in ("BackgroundService", "serve"):
            from headway.app import serving

            return getattr(serving, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__, "client", "testing"})
