"""How each command of the documents is tried: the first matching row applies."""

import re
from dataclasses import dataclass
from fnmatch import fnmatch

from tests.docs.pages import Command

Edits = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Run:
    """Run it to its end, with these edits. Unless it shows the numbers of a busy fleet, its output must be as on the page.

    If the program of an `optional` command isn't installed, the command is parsed instead.
    """

    edits: Edits = ()
    compares: bool = True
    optional: bool = False


@dataclass(frozen=True)
class Start:
    """Start it, and let it run until another command needs its ports. Its output must be as on the page."""

    edits: Edits = ()


@dataclass(frozen=True)
class Remember:
    """Run it before each later command, because it changes the shell's state."""


@dataclass(frozen=True)
class Parse:
    """Only parse it (`why` says why): `headway` by its own command line, anything else by the shell."""

    why: str


How = Run | Start | Remember | Parse
Row = tuple[str, str, How]

NEEDS_HOSTS = "takes what one machine does not have, and its drill is in tests/e2e"
ROWS: list[Row] = [
    ("docs/benchmarks/README.md", r"git worktree|.*loadgen", Parse("a benchmark takes minutes, and another checkout")),
    # Installing needs the network, so use what is installed already.
    (
        "README.md",
        r"make serve$",
        Start((("make serve", "make -o .venv/.ready-serve serve ARGS='--port 8000 --admin-port 9000'"),)),
    ),
    ("README.md", r"make test$", Parse("it would run this")),
    ("*", r"make dist$", Parse("it installs from the network; tests/cli/test_wheel.py tries what it makes")),
    ("*", r"make ", Parse("it takes minutes, and installs from the network")),
    ("*", r"pip install --require-hashes", Parse("it installs from the network")),
    ("*", r"pip install --no-deps dist/", Parse("tests/cli/test_wheel.py installs such a wheel")),
    (
        "*",
        r"/srv/headway/env/bin/pip install |useradd |cp \S+ (/srv/headway|/etc/systemd/system)/",
        Parse("it changes the machine"),
    ),
    ("*", r"promtool test rules ", Parse("it takes seconds; tests/docs/test_alerts.py runs it")),
    ("*", r"promtool ", Run(optional=True)),
    ("*", r"docker ", Parse("it takes a container engine; tests/deploy has the steps of the image")),
    ("*", r"helm |kubectl ", Parse("it takes a cluster; tests/charts renders what Helm would install")),
    (
        "*",
        r"logrotate |systemd-analyze |systemctl ",
        Parse("it looks at places of the machine; tests/deploy/test_systemd.py has the units judged"),
    ),
    ("*", r"python3 -m venv ", Parse("it takes seconds, and is Python's own")),
    ("*", r"\.venv/bin/python bench/", Run()),
    ("*", r"headway plan ", Parse("it simulates for seconds; tests/simulator/test_commands.py runs it")),
    ("*", r"headway simulate ", Run((("--duration 20", "--duration 1"),))),
    ("docs/operations.md", r"headway bench", Parse("it takes nginx in front")),
    (
        "docs/fleet.md",
        r"headway bench",
        Run((("10.0.0.3:8080", "10.0.0.1:8000"), ("--duration ", "--duration 0.")), compares=False),
    ),
    ("*", r"headway bench .* --duration", Run((("--duration ", "--duration 0."),), compares=False)),
    ("docs/ledger.md", r"headway serve|HEADWAY_LEDGER=", Parse("tests/e2e/test_ledger.py runs both")),
    ("docs/tracing.md", r"headway serve|export OTEL", Parse("tests/e2e/test_traces.py does, with a collector")),
    ("docs/bulk.md", r"headway (serve|bulk) ", Parse("tests/bulk/test_cli.py and tests/e2e/test_bulk.py do")),
    ("docs/fleet.md", r"headway (un)?drain ", Parse("it takes a fleet: tests/e2e/test_fleet_restarts.py has one")),
    ("docs/fleet.md", r"headway worker .* --name extra", Parse("tests/e2e/test_rollouts.py names workers so")),
    (
        "docs/operations.md",
        r"kill \$PID; curl ",
        Parse("it takes a request in flight: tests/e2e/test_shutdown.py has one"),
    ),
    (
        "docs/errors.md",
        r"curl .* 'X-Request-Tier: free'",
        Parse("it takes a lowest tier without room: tests/services/test_lookout.py has one"),
    ),
    (
        "docs/redis.md",
        r"headway gateway --broker",
        Parse("it takes a server with that fault: tests/redis/test_door.py has each"),
    ),
    ("docs/redis.md", r"HEADWAY_BROKER=|export |headway |admin", Parse(NEEDS_HOSTS)),
    ("docs/fleet.md", r"headway status$", Run(compares=False)),
    ("README.md", r"headway worker ", Start((("--workers 8", "--workers 2 --admin-port 9001"),))),
    (
        "*",
        r"headway .* --(tls-cert|ca|remote-ca) ",
        Parse("it takes certificates; tests/cli/test_tls.py and tests/backends/test_remote_tls.py make some"),
    ),
    ("*", r"grpcurl ", Run(optional=True)),
    ("docs/grpc.md", r"mkdir stubs$|python -m grpc_tools\.protoc ", Parse("tests/clients/test_snippets.py runs them")),
    (
        "docs/remote.md",
        r"HEADWAY_REMOTE_TOKEN=\S+ headway serve ",
        Parse("it takes an API of others; tests/backends/test_http.py has some"),
    ),
    (
        "docs/remote.md",
        r"headway serve (http|grpc)://triton\.example\.com",
        Parse("it takes Triton: tests/e2e/test_triton.py has it"),
    ),
    ("docs/padding.md", r"python -c ", Run()),
    ("docs/planning.md", r"headway check .* --record ", Run((("model.py:Model", "model.py:Ender"),))),
    (
        "docs/tensors.md",
        r"headway serve examples/|curl .*(6\.1|\[5, 3, 1, 0\]|a cat)",
        Parse("it takes packages of its own: tests/clients/test_examples.py runs it where they are"),
    ),
    ("*", r"headway \w+ examples/embeddings.py:", Parse("it takes torch")),
    ("*", r"openssl ", Run()),
    ("*", r"python ask\.py$", Run()),
    ("*", r"\. \S+/activate$|export \w+=|\w+=\S*$", Remember()),
    ("*", r"(python examples/|headway (serve|gateway|worker|controller) )", Start()),
    ("*", r"curl |for i in .*; do curl |(EMULATED_BETA_MS=\S+ )?headway |printf ", Run()),
]


def how(command: Command) -> How | None:
    """Return how a command is tried, or None if no row matches. If the page shows that a server refuses to start, it is run to its end."""
    for page, pattern, way in ROWS:
        if fnmatch(command.page, page) and re.match(pattern, command.text):
            refused = isinstance(way, Start) and any(line.startswith("headway: ") for line in command.shown)
            return Run(way.edits) if refused and isinstance(way, Start) else way
    return None
