"""Headway turns single inference requests into full batches for scarce GPUs, and brings each answer back.

The map of the house. Imports only point down the list, from package to package, which a test enforces.

    cli          the commands, one file each
    app          puts a process together, starts it, and ends it in order; the only place that chooses adapters
    admin        the admin port of every process
    http         the public port: its listener and connections, the inference routes, the ordinary ones
    telemetry    metrics, named in one place
    simulator    the production policies under virtual time
    load         the load generator
    gateway      the client's side: takes a request in, and holds it until its answer comes
    worker       the batcher, one for each GPU: claim, run, complete
    controller   publishes the capacity of the workers
    fleet        membership of the processes, and reaping of ended leases
    brokers      where entries wait: in memory, over Redis
    backends     ways to the black box: a child process, a remote API
    identity     authentication: API keys, JSON Web Tokens
    storage      SQLite and PostgreSQL: the ledger and the keys
    runtime      what every loop uses: supervision, periods, deadlines, counters, the log
    ports        the Protocols between services and adapters
    config       all settings, and the target that is served
    core         the pure rules: departures, fair queueing, admission, retries
    model        the nouns: plain data
    errors       the tree of errors
"""

__version__ = "0.1.0"
