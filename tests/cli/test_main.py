import contextlib
import functools
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

import headway
from headway.app.roles import ROLES as PARTS
from headway.cli import COMMANDS
from headway.cli.flags import with_settings
from headway.config import FIELDS, Settings, flag, kind
from headway.errors import SettingError
from headway.model import Role
from tests.cli.command import ROOT, code_of

HEAVY = {"aiohttp", "asyncio", "msgspec", "prometheus_client", "pydantic", "structlog", "uvloop"}
UNASKED = frozenset((
    "aiohttp", "asyncpg", "difflib", "google.protobuf", "grpc", "hpack", "jwt", "numpy", "opentelemetry", "pydantic",
    "headway.backends.grpc", "headway.backends.http", "headway.backends.remote", "headway.bulk", "headway.dialects.table",
    "headway.grpc", "headway.identity.api_keys.cache", "headway.identity.jwt", "headway.input_policy", "headway.load",
    "headway.protos", "headway.simulator", "headway.storage", "headway.telemetry.trace_environment", "headway.telemetry.trace_exporter",
))  # fmt: skip
"""Modules that no process loads unless a setting requires them."""
FLEET = UNASKED - {"opentelemetry"}
"""The same for users of Redis: its client imports OpenTelemetry if that is installed."""
NO_CLIENTS = frozenset((
    "headway.gateway.gateway", "headway.http.inference", "headway.oip.rest", "headway.http.openai", "headway.http.public", "headway.oip",
))  # fmt: skip
NO_WORKERS = frozenset(("headway.backends.process.backend", "headway.worker"))
LEAN = {
    "serve": UNASKED | {"headway.brokers.redis", "redis"},
    "gateway": FLEET | NO_WORKERS | {"headway.brokers.memory", "headway.controller"},
    "worker": FLEET | NO_CLIENTS | {"headway.brokers.memory", "headway.controller"},
    "controller": FLEET | NO_CLIENTS | NO_WORKERS | {"headway.brokers.memory"},
}
"""Modules that a process doesn't load unless a setting requires them, by role."""
SUBCOMMANDS = [["dlq", "list"], ["keys", "create"]]


@functools.cache
def all_help_of(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert code_of([command, "--help-all"]) == 0
    return out.getvalue()


@functools.cache
def help_of(*command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert code_of([*command, "--help"]) == 0
    return shown.getvalue()


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules that a statement imports in a fresh interpreter."""
    return {name.split(".")[0] for name in all_modules_after(statement)}


SHOW_HELP = """
import contextlib, io, json, sys
import headway.cli
shown = {"": [*sys.modules]}
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        headway.cli.main([*command, "--help"])
    shown[" ".join([*command, "--help"])] = [*sys.modules]
print(json.dumps(shown))
"""
"""Shows the help of commands one after the other, and reports the modules loaded after each."""


def all_modules_after(statement: str) -> list[str]:
    program = (
        f"import sys\ntry:\n    {statement}\nexcept SystemExit: pass\nimport json\nprint(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def within(names: Collection[str], packages: Collection[str]) -> set[str]:
    return {name for name in names if any(f"{name}.".startswith(f"{one}.") for one in packages)}


@pytest.mark.processes
def test_the_help_of_no_command_imports_anything_heavy() -> None:
    """Help must appear within 0.3 s. `msgspec`, which the settings need, takes a tenth of that."""
    commands: list[list[str]] = [[], *([name] for name in COMMANDS), *SUBCOMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", SHOW_HELP, json.dumps(commands)], cwd=ROOT, capture_output=True, check=True, timeout=120
    )
    unused = HEAVY | {"attr", "http", "markdown_it", "pygments", "redis", "rich", "ssl", "urllib3"}
    modules = {after: {name.split(".")[0] for name in names} for after, names in json.loads(done.stdout).items()}
    assert "click" in modules["--help"]
    for after, names in modules.items():
        assert names & (unused if after in ("", "--help") else unused - {"msgspec"}) == set(), after


@pytest.mark.processes
@pytest.mark.parametrize("role", LEAN)
def test_a_role_imports_only_what_it_needs(role: str) -> None:
    given = {} if role == "serve" else {"broker": "redis://127.0.0.1:1/0"}
    target = "json:loads" if role in ("serve", "worker") else ""
    statement = f"""import asyncio
    from headway.app.runner import build
    from headway.config import load
    from headway.model import Role
    settings = load({given}, {{}})
    async def made(): build(settings, Role({role!r}), {target!r})
    asyncio.run(made())"""
    modules = all_modules_after(statement)
    assert f"headway.app.{'workers' if target else 'wiring'}" in modules
    assert within(modules, LEAN[role]) == set()


@pytest.mark.processes
def test_a_service_starts_without_what_it_does_not_use() -> None:
    """It gets as far as loading its target, which doesn't exist. By then, garbage collection is on again."""
    command = ["headway", "serve", "nothing:here", "--port", "0", "--admin-port", "0"]
    statement = f"import gc; sys.argv = {command}; from headway.__main__ import main"
    modules = modules_after(f"{statement}\n    try: main()\n    finally: assert gc.isenabled()")
    assert {"headway", "structlog", "uvloop"} <= modules
    assert modules & {"aiohttp", "attr", "pydantic", "pygments", "rich"} == set()


@pytest.mark.processes
def test_a_target_is_checked_without_what_that_does_not_use() -> None:
    modules = modules_after("from headway.cli import main; main(['check', 'json:loads', '--devices', 'cpu'])")
    assert {"headway", "structlog"} <= modules
    assert modules & {"aiohttp", "pydantic"} == set()


@pytest.mark.processes
def test_what_a_service_does_without_is_there_for_whoever_imports_it_later() -> None:
    statement = "import headway.runtime.logger; import rich.traceback, structlog.dev"
    assert {"pygments", "rich"} <= modules_after(statement)


@pytest.mark.parametrize("command", ["submit", "list"])
def test_the_help_of_bulk_jobs_tells_each_default_once(command: str) -> None:
    shown = " ".join(help_of("bulk", command).split())
    assert shown.count("(default") == 2
    assert "[default" not in shown


def test_help_lists_every_command() -> None:
    shown = help_of()
    for name, one in COMMANDS.items():
        assert f"  {name} " in shown
        assert f"\n{one.heading}:\n" in shown
        assert one.summary[:30] in shown


@pytest.mark.parametrize("role", ["serve", "gateway", "worker", "controller"])
def test_the_help_of_a_role_is_short_and_says_how_to_see_all_of_it(role: str) -> None:
    short, whole = help_of(role), all_help_of(role)
    assert f"headway {role} --help-all" in " ".join(short.split())
    assert len(short.splitlines()) < 140 < len(whole.splitlines())
    flags = {flag(name) for name in PARTS[Role(role)].settings}
    assert {flag(name) for name, one in FIELDS.items() if one.common} & flags <= {
        one for one in flags if f" {one} " in short
    }
    assert "--keep-days" not in short


@pytest.mark.parametrize("flag", ["--version", "-V", "version"])
def test_the_version_is_printed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([flag]) == 0
    assert capsys.readouterr().out == f"headway {headway.__version__}\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("headway se", ["serve"]),
        ("headway serve --max-batch-s", ["--max-batch-size"]),
        ("headway dlq re", ["replay"]),
        ("headway keys create --ten", ["--tenant"]),
    ],
)
def test_a_shell_completes_commands_and_flags(
    words: str, completed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_HEADWAY_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert code_of([]) == 0
    assert capsys.readouterr().out.split() == [f"plain,{one}" for one in completed]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), *SUBCOMMANDS], ids=" ".join)
def test_the_help_of_a_command_names_it_and_nothing_that_is_not_there(command: list[str]) -> None:
    shown = help_of(*command)
    assert " ".join(["headway", *command]) in shown
    assert re.findall(r"<\w+(?:\[\w+\])?>", shown) == [], "a value is asked for where there is none"
    assert "examples/" not in shown, "a wheel has no such folder"


def test_serve_has_a_flag_for_every_setting_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["serve", "--help-all"]) == 0
    shown = capsys.readouterr().out
    flowing = " ".join(shown.split())  # A default may be split over two lines.
    for name, field in FIELDS.items():
        assert f"{flag(name)} " in shown
        assert f"\n{field.group}:\n" in shown
        if kind(name) is bool:
            assert f"--no-{flag(name)[2:]}" in shown
        elif field.default:
            assert f"(default {field.default}".removesuffix(".0") in flowing


def test_a_wrong_command_or_flag_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["srve"]) == 2
    assert "Did you mean 'serve'?" in capsys.readouterr().err
    assert code_of(["serve", "x:y", "--max-batch", "3"]) == 2
    assert "--max-batch-size" in capsys.readouterr().err
    assert code_of(["serve"]) == 2
    assert "TARGET" in capsys.readouterr().err


def test_a_misspelt_variable_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_MAX_BATCHSIZE", "8")
    monkeypatch.setenv("HEADWAY_SERVICE_HOST", "10.0.0.1")

    def command(settings: Settings) -> None:
        assert settings.max_batch_size == FIELDS["max_batch_size"].default

    with_settings(("port",))(command)(port=None)
    assert capsys.readouterr().err == (
        "headway: HEADWAY_MAX_BATCHSIZE is not a setting, and has no effect. Did you mean HEADWAY_MAX_BATCH_SIZE?\n"
    )


@pytest.mark.parametrize(
    ("given", "spelt"),
    [
        ("flag", "--keys"),
        ("environment", "HEADWAY_KEYS"),
        ("file", "headway.toml: keys"),
        ("named file", "own.toml: keys"),
        ("nothing", "--keys"),
    ],
)
def test_late_refusals_name_the_text(given: str, spelt: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if given == "environment":
        monkeypatch.setenv("HEADWAY_KEYS", "none.toml")
    if given.endswith("file"):
        Path("own.toml" if given == "named file" else "headway.toml").write_text('keys = "none.toml"')

    def command(settings: Settings) -> None:
        raise SettingError("keys", settings.keys, "will not do", "Name another.")

    with pytest.raises(SettingError) as refused:
        with_settings(("keys",))(command)(
            config="own.toml" if given == "named file" else None, keys="none.toml" if given == "flag" else None
        )
    assert refused.value.setting == spelt


def test_a_bad_setting_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["serve", "x:y", "--port", "http"]) == 3
    told = "headway: --port = 'http': is not a whole number. Write digits only.\n"
    assert capsys.readouterr() == ("", told)


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "arguments", [["--help"], ["simulate", "--rate", "10", "--workers", "1", "--batch-ms", "10", "--duration", "1"]]
)
def test_a_full_disk_is_told_in_one_line(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "headway", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "headway: the output cannot be written: No space left on device\n")


SIGNALLED = """
import signal, sys, types
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # A parent without a terminal may have it ignored.
from headway import __main__ as program
stub = sys.modules["headway.cli"] = types.ModuleType("headway.cli")
stub.main = lambda: signal.raise_signal(signal.Signals[sys.argv.pop()])
program.main()
"""
"""`headway COMMAND`, which gets the signal named by its last argument before it has imported any of the command line."""


@pytest.mark.processes
def test_a_failover_that_is_interrupted_before_it_asks_any_server_says_that_nothing_was_begun() -> None:
    command = [sys.executable, "-c", SIGNALLED, "failover", "SIGINT"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (1, "headway: interrupted by SIGINT; nothing was started\n")


@pytest.mark.parametrize("named", [[], ["a"], ["a@1"]], ids=str)
def test_a_model_of_the_file_without_a_target_is_told_where_to_write_it(
    named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "headway.toml").write_text('[models."a@1"]\nworkers = 1\n')
    assert code_of(["serve", *named]) == 4
    told = 'Give a@1=TARGET on the command line, or write target = "…" in [models."a@1"] of headway.toml.'
    assert capsys.readouterr() == ("", f"headway: model 'a@1' has no target. {told}\n")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command", "code"),
    [*((role, 0) for role in ("serve", "gateway", "worker", "controller")), ("status", -signal.SIGHUP)],
)
def test_a_role_outlives_a_hangup_from_its_first_moment_on_and_no_other_command_does(command: str, code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", SIGNALLED, command, "SIGHUP"], cwd=ROOT, check=False, timeout=60)
    assert ended.returncode == code
