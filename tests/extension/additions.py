"""One addition of each kind, made as docs/architecture.md says: whole files that are new, and lines in files that are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Addition:
    """Files and lines that one addition touches.

    Attributes:
        kind: kind of the addition, as the table names it.
        files: the new files and their texts.
        lines: file, a text that is there once, and what takes its place.
        words: the same for documents and lists in tests.
        renewed: documents that a program writes from the code.
    """

    kind: str
    files: Mapping[str, str] = field(default_factory=dict)
    lines: Sequence[tuple[str, str, str]] = ()
    words: Sequence[tuple[str, str, str]] = ()
    renewed: Sequence[str] = ()

    def make(self, root: Path) -> None:
        """Make it in a copy of the repository."""
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
"""Documents that are made from the settings."""

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
            "from headway.core.policies.paced import Paced\n",
            "from headway.core.policies.patient import Patient\n",
        ),
        after(
            "headway/core/policies/__init__.py",
            '    "paced": Kind(Paced),\n',
            '    "patient": Kind(Patient, wait=0.020),\n',
        ),
    ],
    [before("docs/batching.md", "| `pid` | as `window`,", "| `patient` | when it is late | if you have time |\n")],
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
        after(
            "headway/config/urls.py",
            "    **dict.fromkeys(SCHEMES, _redis_fault),\n",
            '    "kettle": lambda url: None,\n',
        ),
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
            '    "valkey": lambda servers: RedisHarness(servers.of("valkey")),\n',
            '    "kettle": lambda _: MemoryHarness(kind=KettleBroker),\n',
        ),
        after("tests/contracts/brokers.py", 'EXAMPLES = ("memory", "near", ', '"kettle", '),
    ],
)

BACKEND = Addition(
    "backend",
    {
        "headway/backends/kettle.py": '''
"""A backend that boils whatever it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.model import Entry, ItemResult, Signature


class KettleBackend:
    """One kettle."""

    pid = 0
    warm_up = ()
    signature = Signature()

    async def start(self) -> float:
        """Fill it."""
        return 0.001

    async def run(self, entries: Sequence[Entry], timeout: float) -> Sequence[ItemResult]:
        """Boil a batch."""
        return [ItemResult(f"hot {entry.input}") for entry in entries]

    async def gone(self) -> None:
        """Never."""
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Empty it."""
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
            "BUILDS = {\n",
            """@asynccontextmanager
async def kettle() -> AsyncIterator[Backend]:
    from headway.backends.kettle import KettleBackend

    yield KettleBackend()


""",
        ),
        after("tests/contracts/test_backend.py", '    "process": process,\n', '    "kettle": kettle,\n'),
    ],
)

DIALECT = Addition(
    "dialect",
    {
        "headway/dialects/kettle.py": '''
"""Dialect `kettle-list`: a list of texts, for kettles."""

from __future__ import annotations

from typing import ClassVar

from headway.dialects.texts import TextList


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
            "from headway.dialects.openai import",
            "from headway.dialects.kettle import KettleList\nfrom headway.dialects.openai import",
        ),
        (
            "headway/dialects/__init__.py",
            'NAMES = ("list", ',
            'NAMES = ("list", "kettle-list", ',
        ),
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
        (
            "headway/errors.py",
            'CANCELLED = "CANCELLED"\n',
            """TEAPOT = _code("TEAPOT", 418, "A teapot", "Coffee was asked for.", hopeless=True, refusal=True)
CANCELLED = "CANCELLED"
""",
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
        after("docs/ledger.md", "Counted so are `BAD_REQUEST`,", " `TEAPOT`,"),
    ],
)

METRIC = Addition(
    "metric",
    {},
    [
        before(
            "headway/runtime/counters.py",
            "        self.client_retries = 0\n",
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
        after("tests/test_metrics.py", "NAMES = {\n", '    "headway_cups": ("counter", {"model"}),\n'),
        after(
            "tests/test_metrics.py", "    counters.store.ledger_dropped = 8\n", '    counters.gateway.cups["m"] = 2\n'
        ),
    ],
)

GAUGE = Addition(
    "gauge",
    {},
    [
        before("headway/telemetry/figures.py", "    exports_fleet: bool = True\n", "    tea: float | None = None\n"),
        before(
            "headway/app/process_figures.py",
            "            exports_fleet=alone or",
            "            tea=settings.steep_s,\n",
        ),
        before(
            "headway/telemetry/metrics.py",
            '    Row(GAUGE, "broker_up",',
            '    Row(GAUGE, "tea_seconds", "", "How long tea draws.", lambda of: of.own.tea),\n',
        ),
    ],
    [
        before(
            "docs/metrics.md", "| `headway_retries_total` |", "| `headway_tea_seconds` | – | how long tea draws |\n"
        ),
        after("tests/test_metrics.py", "NAMES = {\n", '    "headway_tea_seconds": ("gauge", set()),\n'),
        after("tests/test_metrics.py", "        ledger_backlog=15,\n", "        tea=4.0,\n"),
        after("tests/test_metrics.py", "        ledger_backlog=0,\n", "        tea=0.0,\n"),
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
        ),
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
from headway.http.requests import JSON, Request, RouteAnswer
from headway.http.routing import Authentication, Route


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
            "from headway.http.routing import Authentication, NoRoute, Route, Router\n",
            "from headway.http import tea  # isort: skip\nfrom headway.http.routing import Authentication, NoRoute, Route, Router\n",
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
        after(
            "headway/http/__init__.py",
            "tasks              GET and DELETE /v1/result/{task_id}\n",
            "tea                GET /tea\n",
        ),
    ],
    [
        after(
            "docs/http.md",
            "a connection carries one request at a time.\n",
            "- `GET /tea` and `GET /tea/best` pour tea.\n",
        ),
        after("tests/http/test_public.py", '"/v1/result/{task_id}", ', '"/tea", "/tea/best", '),
        ("tests/e2e/test_contract.py", '    "others": (29, ', '    "others": (31, '),
        after("tests/clients/openapi_python_program.py", 'for name in ("live", ', '"tea", "best_tea", '),
        before(
            "tests/clients/openapi_calls.ts",
            "  await of('live', made.live());\n",
            "  await of('tea', made.tea());\n  await of('bestTea', made.bestTea());\n",
        ),
    ],
)

GRPC_METHOD = Addition(
    "method of gRPC",
    {
        "headway/protos/headway/v1/tea.proto": """
syntax = "proto3";

package headway.v1;

service Tea {
  rpc Pour(PourRequest) returns (PourResponse);
}

message PourRequest {
  string leaves = 1;
}

message PourResponse {
  string cup = 1;
}
""",
        "headway/grpc/tea.py": '''
"""Tea service of the port: `headway.v1.Tea`."""

from __future__ import annotations

from headway import errors
from headway.errors import RequestError
from headway.grpc import messages
from headway.model import Principal

_REQUEST = messages.message("headway.v1.PourRequest")
_RESPONSE = messages.message("headway.v1.PourResponse")


async def pour(body: bytes, principal: Principal) -> bytes:
    """Answer Pour."""
    leaves = messages.read(_REQUEST, body).leaves
    if leaves == "coffee":
        raise RequestError("this is a teapot", code=errors.TEAPOT)
    return bytes(_RESPONSE(cup=f"hot {leaves}").SerializeToString())
''',
    },
    [
        (
            "headway/grpc/methods.py",
            "from headway.grpc.connection import MakeCall\n",
            "from headway.grpc.connection import MakeCall\nfrom headway.grpc.tea import pour\n",
        ),
        before(
            "headway/grpc/methods.py",
            '        f"/{messages.HEALTH}/Check": lambda',
            '        f"/{messages.TEA}/Pour": lambda stream: PlainCall(port, stream, pour),\n',
        ),
        after("headway/grpc/messages.py", 'HEADWAY = "headway.v1.Inference"\n', 'TEA = "headway.v1.Tea"\n'),
        ("headway/grpc/messages.py", "SERVICES = (HEADWAY, ", "SERVICES = (HEADWAY, TEA, "),
    ],
    [
        before(
            "docs/grpc.md",
            "| `inference.GRPCInferenceService` |",
            "| `headway.v1.Tea` | `Pour`: `leaves` to a `cup` |\n",
        )
    ],
)

INFERENCE_ROUTE = Addition(
    "inference route",
    {
        "headway/http/inference/brew.py": '''
"""Codec of POST /brew, whose errors are an object with one member."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from headway.config import Settings
from headway.doors.bodies import ABSENT, body_reader, value_reader
from headway.errors import AnyError
from headway.http.inference.codecs import Codec
from headway.model import TokenCount


class _Order(msgspec.Struct, gc=False):
    input: str = msgspec.field(name="leaves")
    model: str | None = None
    parameters: msgspec.Raw = ABSENT


class _AnyOrder(msgspec.Struct, gc=False):
    input: msgspec.Raw = msgspec.field(name="leaves")
    inputs: ClassVar[msgspec.Raw] = ABSENT
    model: str | None = None
    parameters: msgspec.Raw = ABSENT
    version: ClassVar[None] = None
    model_version: ClassVar[None] = None


def brew(settings: Settings) -> Codec:
    """Make the codec."""
    read, read_value = body_reader(_Order, settings), value_reader(_AnyOrder, settings)
    return Codec(read=read, write=_write, read_value=read_value, encode_error=_encode_error)


def _write(shown: str, output: str | msgspec.Raw, milliseconds: float, version: str, tokens: TokenCount | None = None) -> bytes:
    return msgspec.json.encode({"cup": output})


def _encode_error(error: AnyError, shown: str) -> tuple[dict[str, str], bytes]:
    text = error.message.encode("utf-8", "backslashreplace").decode()
    return {"content-type": "application/json"}, msgspec.json.encode({"spilt": text})
'''
    },
    [
        (
            "headway/http/inference/routes.py",
            "from headway.http.inference.codecs import Codec,",
            "from headway.http.inference.brew import brew\nfrom headway.http.inference.codecs import Codec,",
        ),
        after("headway/http/inference/routes.py", '    "/v1/predict": predict,\n', '    "/brew": brew,\n'),
        before(
            "headway/http/contract.json",
            '      "/v1/result/{task_id}": {\n',
            """      "/brew": {
        "post": {
          "operationId": "brew",
          "requestBody": {"required": true, "content": {"application/json": {"schema": {"type": "object"}}}},
          "responses": {"200": {"description": "A cup.", "headers": {"...": ["limited"]}}},
          "security": "${security}"
        }
      },
""",
        ),
    ],
    [
        after("docs/http.md", "- `GET /tea` and `GET /tea/best` pour tea.\n", "- `POST /brew` takes `leaves`.\n"),
        before("tests/http/test_public.py", '"/livez", "/readyz", "/healthz",', '"/brew", '),
        ("tests/e2e/test_contract.py", '    "others": (31, ', '    "others": (32, '),
        before(
            "tests/clients/openapi_python_program.py",
            '    for name in ("live", ',
            '    call("brew", body=made_of.BrewBody())\n',
        ),
        before(
            "tests/clients/openapi_calls.ts",
            "  await of('live', made.live());\n",
            "  await of('brew', made.brew({ body: { leaves: 'oolong' } }));\n",
        ),
    ],
)

ROLE = Addition(
    "role",
    {
        "headway/cli/butler.py": '''
"""`headway butler`: runs batches and looks after the workers."""

from __future__ import annotations

from collections.abc import Sequence

from headway.cli.commands import command
from headway.cli.roles import run_targets, targets_argument, with_settings_of
from headway.config import Settings
from headway.model import Role


@command()
@targets_argument
@with_settings_of(Role.BUTLER)
def butler(settings: Settings, targets: Sequence[str]) -> None:
    """Run TARGET and look after the workers."""
    run_targets(settings, Role.BUTLER, targets)
'''
    },
    [
        after("headway/model/fleet.py", '    CONTROLLER = "controller"\n', '    BUTLER = "butler"\n'),
        before(
            "headway/app/roles.py",
            "    Role.CONTROLLER: Parts(",
            '    Role.BUTLER: Parts("Headway butler {name} runs {target}", batchers=True, controller=True),\n',
        ),
        before(
            "headway/cli/__init__.py",
            '    "check": Lazy(',
            '    "butler": Lazy("headway.cli.butler:butler", "Serve", "Run TARGET and look after the workers."),\n',
        ),
    ],
)

ADDITIONS = (POLICY, BROKER, BACKEND, DIALECT, ERROR, METRIC, GAUGE, SETTING, ROUTE, GRPC_METHOD, INFERENCE_ROUTE, ROLE)
