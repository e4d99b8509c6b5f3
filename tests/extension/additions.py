"""One addition of each kind, made as docs/architecture.md says: new files, and lines added to existing files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Addition:
    """The files and lines that an addition changes.

    Attributes:
        kind: the kind of addition, as in the table.
        files: the new files and their contents.
        lines: file, a string that it contains once, and its replacement.
        words: the same for documents and for lists in tests.
        renewed: documents that a program generates from the code.
    """

    kind: str
    files: Mapping[str, str] = field(default_factory=dict)
    lines: Sequence[tuple[str, str, str]] = ()
    words: Sequence[tuple[str, str, str]] = ()
    renewed: Sequence[str] = ()

    def make(self, root: Path) -> None:
        for name, text in self.files.items():
            path = root / name
            assert not path.exists(), name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.lstrip("\n"), encoding="utf-8")
        for name, there, instead in (*self.lines, *self.words):
            text = (root / name).read_text(encoding="utf-8")
            assert text.count(there) == 1, (
                f"{there!r} stands {text.count(there)} times in {name}, not once: mend this addition's line"
            )
            (root / name).write_text(text.replace(there, instead), encoding="utf-8")


def after(name: str, there: str, more: str) -> tuple[str, str, str]:
    return name, there, there + more


def before(name: str, there: str, more: str) -> tuple[str, str, str]:
    return name, there, more + there


SETTINGS = ("docs/settings.md", "deploy/helm/headway/values.schema.json")
"""Documents generated from the settings."""

POLICY = Addition(
    "policy",
    {
        "headway/core/policies/patient.py": '''
"""`patient`: a batch leaves when it is full, or late."""

from __future__ import annotations

from headway.core.departure import Load, Rule


class Patient:
    """Waits at most `max_wait` seconds for a full batch."""

    def __init__(self, max_wait: float) -> None:
        self._window = max_wait

    def rule(self, load: Load) -> Rule:
        """Full at the largest batch, or when the window is over."""
        return Rule(size=load.max_batch, window=self._window)
'''
    },
    [
        after(
            "headway/core/policies/__init__.py",
            "from headway.core.policies.paced import DEFAULT_WINDOW, Paced, Pid, Table, Window\n",
            "from headway.core.policies.patient import Patient\n",
        ),
        after(
            "headway/core/policies/__init__.py",
            '    "paced": Kind(Paced),\n',
            '    "patient": Kind(Patient, wait=0.020),\n',
        ),
    ],
    [before("docs/batching.md", "| `pid` | as with `window`,", "| `patient` | when it is late | if you have time |\n")],
    SETTINGS,
)

BROKER = Addition(
    "broker",
    {
        "headway/brokers/kettle.py": '''
"""A broker that is the one in memory under another name."""

from __future__ import annotations

from headway.brokers.memory.broker import MemoryBroker


class KettleBroker(MemoryBroker):
    """Keeps what waits warm."""
'''
    },
    [
        after("headway/config/urls.py", "{**dict.fromkeys(SCHEMES, _redis_fault)", ', "kettle": lambda url: None'),
        after("headway/app/brokers.py", "    **dict.fromkeys(SCHEMES, _redis),\n", '    "kettle": _kettle,\n'),
        (
            "headway/app/brokers.py",
            "BROKERS: Mapping",
            """def _kettle(settings: Settings, counters: BrokerCounts, clock: Callable[[], float]) -> BrokerBundle:
    from headway.brokers.kettle import KettleBroker
    from headway.brokers.memory.dead_letters import DeadLetterBox
    from headway.brokers.memory.fleet import MemoryBoard, MemoryFleet

    letters = DeadLetterBox()

    async def now() -> float:
        return clock()

    broker = KettleBroker(_models(settings), letters, counters, clock, random.random, _kept(settings))
    return BrokerBundle(broker, letters, MemoryFleet(clock), MemoryBoard(clock), now)

BROKERS: Mapping""",
        ),
    ],
    [
        before(
            "tests/contracts/brokers.py",
            "from headway.brokers.memory.broker import",
            "from headway.brokers.kettle import KettleBroker\n",
        ),
        before(
            "tests/contracts/brokers.py",
            '    "valkey": lambda servers, **how: RedisHarness(servers.of("valkey"), **how),\n',
            '    "kettle": lambda _, **how: MemoryHarness(kind=KettleBroker, **how),\n',
        ),
        after("tests/contracts/brokers.py", 'EXAMPLES = ("memory", ', '"kettle", '),
    ],
)

BACKEND = Addition(
    "backend",
    {
        "headway/backends/kettle.py": '''
"""A backend that writes texts in capitals."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.errors import BackendError
from headway.model import Entry, ItemResult, Signature


class KettleBackend:
    """One kettle."""

    pid = 0
    warm_up = ()
    signature = Signature()
    started = False

    async def start(self) -> float:
        """Fill it."""
        self.started = True
        return 0.001

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        """Boil a batch."""
        if not self.started:
            raise BackendError("the kettle is empty")
        return [ItemResult(str(entry.input).upper()) for entry in entries]

    async def gone(self) -> None:
        """Never."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Empty it."""
        self.started = False
'''
    },
    [
        (
            "headway/config/target.py",
            "Target = ModuleTarget | FileTarget | RemoteTarget | ObservedTarget\n",
            '''@dataclass(frozen=True, slots=True)
class KettleTarget:
    """A kettle."""

    url: str

    def __str__(self) -> str:
        return self.url

Target = ModuleTarget | FileTarget | RemoteTarget | ObservedTarget | KettleTarget
''',
        ),
        (
            "headway/config/target.py",
            '    "https": RemoteTarget,\n',
            '    "https": RemoteTarget,\n    "kettle": KettleTarget,\n',
        ),
        (
            "headway/app/backends.py",
            "from headway.config import CHARS,",
            "from headway.backends.kettle import KettleBackend\nfrom headway.config import CHARS,",
        ),
        (
            "headway/app/backends.py",
            "from headway.config.target import FileTarget,",
            "from headway.config.target import FileTarget, KettleTarget,",
        ),
        after(
            "headway/app/backends.py",
            "    FileTarget: _LOCAL,\n",
            '    KettleTarget: BackendKind(lambda target, plan: KettleBackend(), "kettle", ("kettle", "kettles")),\n',
        ),
    ],
    [
        before(
            "tests/contracts/test_backend.py",
            'BUILDS = {"process": ',
            """@asynccontextmanager
async def kettle() -> AsyncIterator[Backend]:
    from headway.backends.kettle import KettleBackend

    yield KettleBackend()


""",
        ),
        after("tests/contracts/test_backend.py", '"process": process, ', '"kettle": kettle, '),
    ],
)

DIALECT = Addition(
    "dialect",
    {
        "headway/dialects/kettle.py": '''
"""Dialect `kettle-list`: a list of texts, for kettles."""

from __future__ import annotations

from typing import ClassVar

from headway.dialects.table import TextList


class KettleList(TextList, frozen=True):
    """Texts for a kettle."""

    path: ClassVar[str] = ".*/kettle"
'''
    },
    [
        (
            "headway/dialects/table.py",
            '    "list": TextList,\n',
            '    "list": TextList,\n    "kettle-list": KettleList,\n',
        ),
        (
            "headway/dialects/table.py",
            "DIALECTS: Mapping",
            "from headway.dialects.kettle import KettleList  # noqa: E402\n\nDIALECTS: Mapping",
        ),
        ("headway/dialects/__init__.py", 'NAMES = ("list", ', 'NAMES = ("list", "kettle-list", '),
    ],
    [
        before(
            "docs/remote.md", "| `inputs` | by name only |", "| `kettle-list` | `…/kettle` | as `list` | the same |\n"
        ),
        after(
            "tests/backends/speakers.py",
            '    "list": Speaker("/batch", lambda body: list(body), list, _PLAIN, str.upper),\n',
            '    "kettle-list": Speaker("/kettle", lambda body: list(body), list, _PLAIN, str.upper),\n',
        ),
    ],
    SETTINGS,
)

ERROR = Addition(
    "error",
    {},
    [
        before(
            "headway/errors.py",
            'CANCELLED = "CANCELLED"',
            'TEAPOT = _code("TEAPOT", 418, "A teapot", "Coffee was asked for.", hopeless=True, refusal=True)\n',
        ),
        before("headway/client/errors.py", "    errors.REJECTED_BY_MODEL: ", "    errors.TEAPOT: RejectedByModel,\n"),
    ],
    [
        (
            "docs/errors.md",
            "| 429 | `SHED` | at this load",
            "| 418 | `TEAPOT` | coffee was asked for | ask for tea |\n| 429 | `SHED` | at this load",
        ),
        after("docs/grpc.md", "| INVALID_ARGUMENT | `BAD_REQUEST`,", " `TEAPOT`,"),
        after("docs/ledger.md", "This applies to `BAD_REQUEST`,", " `TEAPOT`,"),
    ],
)

METRIC = Addition(
    "metric",
    {},
    [
        before(
            "headway/runtime/counters.py",
            "        self.client_retries = 0  #",
            "        self.cups: defaultdict[str, int] = defaultdict(int)\n",
        ),
        after("headway/runtime/counters.py", "            self.failed_seconds, self.last_answer,", " self.cups,"),
        before(
            "headway/telemetry/metrics.py",
            '    Row(GAUGE, "broker_up",',
            '    Row(COUNTER, "cups", "model", "Cups poured.", lambda of: of.counters.gateway.cups, lambda own: own.models),\n',
        ),
    ],
    [
        before("docs/metrics.md", "| `headway_retries_total` |", "| `headway_cups_total` | model | cups poured |\n"),
        before("tests/test_metrics.py", '    "requests": ("counter"', '    "cups": ("counter", {"model": "m"}, 2),\n'),
        before(
            "tests/test_metrics.py", "    counters.store.ledger_dropped = 8\n", '    counters.gateway.cups["m"] = 2\n'
        ),
    ],
)

SETTING = Addition(
    "setting",
    {},
    [
        (
            "headway/config/settings.py",
            "    reload: bool = setting(",
            '    steep_s: float = setting(180.0, _SERVICE, "How long tea draws.", "s", within=(1, 600))\n    reload: bool = setting(',
        )
    ],
    renewed=SETTINGS,
)

ROUTE = Addition(
    "route",
    {
        "headway/http/tea.py": '''
"""GET /tea."""

from __future__ import annotations

from headway import errors
from headway.errors import RequestError
from headway.http.routing import JSON, Authentication, Request, Route, RouteAnswer


def routes(known: Authentication) -> list[Route]:
    """One route for everybody, and one for those who have a key."""
    return [Route("/tea", _tea), Route("/tea/best", known(_tea))]


async def _tea(request: Request) -> RouteAnswer:
    if "coffee" in request.query:
        raise RequestError("this is a teapot", code=errors.TEAPOT)
    return RouteAnswer(b'{"tea":"hot"}', media_type=JSON)
'''
    },
    [
        (
            "headway/http/public.py",
            "from headway.http import openapi, tasks\n",
            "from headway.http import openapi, tasks, tea\n",
        ),
        after(
            "headway/http/public.py",
            "            *tasks.routes(gateway, known),\n",
            "            *tea.routes(known),\n",
        ),
        before(
            "headway/http/contract.json",
            '      "/livez": {\n',
            """      "/tea": {"get": {"operationId": "tea", "responses": {"200": {"description": "It is hot."}}, "security": []}},
      "/tea/best": {
        "get": {
          "operationId": "bestTea",
          "responses": {"200": {"description": "It is hot.", "headers": {"...": ["limited"]}}},
          "security": "${security}"
        }
      },
""",
        ),
    ],
    [
        after(
            "docs/http.md",
            "a connection carries one request at a time.\n",
            "- `GET /tea` and `GET /tea/best` pour tea.\n",
        ),
        after("tests/http/test_public.py", '"/v1/result/{task_id}", ', '"/tea", "/tea/best", '),
        ("tests/e2e/test_contract.py", '"others": (15, ', '"others": (17, '),
        after("tests/clients/openapi_python_program.py", 'for name in ("live", ', '"tea", "best_tea", '),
        before(
            "tests/clients/openapi_calls.ts",
            "  await of('live', made.live());\n",
            "  await of('tea', made.tea());\n  await of('bestTea', made.bestTea());\n",
        ),
    ],
)

ADDITIONS = (POLICY, BROKER, BACKEND, DIALECT, ERROR, METRIC, SETTING, ROUTE)
