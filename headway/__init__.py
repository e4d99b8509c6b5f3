"""Headway turns single inference requests into full batches for scarce GPUs, and brings each answer back.

The map of the house. Imports only point down the list, from package to package, which a test enforces.

    cli          the commands, one file each
    app          puts a process together, starts it, and ends it in order; the only place that chooses adapters
    admin        the admin port of every process
    http         the public port: its listener and connections, the inference routes, the ordinary ones
    telemetry    metrics, named in one place
    simulator    the production policies under virtual time
    load         the load generator
    gateway      the client's side: takes a request in, holds it until its answer comes
    worker       the batcher, one for each GPU: claim, run, complete
    controller   publishes what the workers can carry
    fleet        who is there, and whose leases have ended
    brokers      where entries wait: in memory, over Redis
    backends     ways to the black box: a child process, a remote API
    identity     who asks: API keys, JSON Web Tokens
    storage      SQLite and PostgreSQL: the ledger and the keys
    runtime      what every loop uses: supervision, periods, deadlines, counters, the log
    ports        the Protocols between services and adapters
    config       all settings, and the target that is served
    core         the pure rules: when a batch leaves, who rides, who gets in, what a failure leads to
    model        the nouns: plain data
    errors       the tree of errors
"""

__version__ = "0.1.0"
