"""Headway turns single inference requests into full batches for scarce GPUs, and brings each answer back.

For programs there are, each imported when it is first used, so that `import headway` costs nothing:

    headway.serve          serves a function or a class, as `headway serve` does
    headway.Client         asks a running service; headway.AsyncClient does so from asyncio
    headway.client         the clients' results, tasks and errors
    headway.Output         output of a target with the tokens that it has used
    headway.testing        runs a target under the real batcher in a test

The map of the packages. Imports only point down the list, from package to package, which a test enforces.

    cli          the commands, one file each
    testing      a target under the real batcher, for tests of targets
    app          puts a process together by its role, starts it, and ends it in order; the only place that chooses adapters
    admin        the admin port of every process
    http         the way in over HTTP: the public port, its listener and connections, the inference routes, the ordinary ones
    grpc         the way in over gRPC
    doors        what all ways in ask and tell: the entrance of requests, what each is read to, large answers, readiness
    telemetry    metrics, named in one place; traces on their way to a collector
    simulator    the production policies under virtual time
    load         the load generator
    bulk         jobs: files of lines in, files of answers out
    gateway      the client's side: takes a request in, and holds it until its answer comes, also while the broker is away
    worker       the batcher, one for each GPU: claims a batch, runs it, completes it
    controller   publishes the capacity of the workers
    fleet        membership of the processes, and reaping of ended leases
    brokers      where entries wait: in memory, over Redis
    backends     ways to the black box: a child process, a remote API
    identity     authentication: who asks and what they may ask, by API key or JSON Web Token
    input_policy rules on inputs from a file, and searches for their patterns
    storage      SQLite and PostgreSQL: the ledger and the keys
    runtime      what every loop uses: supervision, periods, deadlines, counters, the log
    ports        the Protocols between services and adapters (no TCP port is meant)
    protos       messages of gRPC, in a descriptor pool of their own
    oip          the Open Inference Protocol: what its wire forms have in common; above the ports, each of these
    config       all settings, and the target that is served
    client       clients of a running service, for programs; needs nothing of the rest
    core         the pure rules: departures (a batch is born in `queue`), fair queueing, admission, retries
    model        the nouns: plain data
    v1           where programs find the code that protoc has made of our .proto file
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

if not TYPE_CHECKING:  # Else every name would pass.

    def __getattr__(name):
        """Import what programs use when they first name it."""
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
