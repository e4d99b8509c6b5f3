"""Makes small changes to the code, one at a time, and checks whether a test fails.

    python -P tests/mutants.py [PART | PATTERN …] [--sample 150] [--seed 8] [--jobs 2]

Each part of the code has its own tests; a mutant is run against those that execute the changed function. A part is `core`,
`brokers`, `servers`, `gateway` or `http`. A pattern such as 'headway.gateway.client_quotas*' selects mutants of one part.
A whole part takes hours, so `--sample` draws some mutants at random. Survivors are printed with the lines that they change.
If no test executes a function, its mutants survive; a mutant that never ends counts as killed.

mutmut makes and runs the mutants, in `mutants/PART`, so that a run of one part keeps the results of the others. `-P` stops
Python from taking `tests/http` for the standard library's module.
"""

import argparse
import importlib
import math
import os
import random
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
FIRST = "core"
"""The default part."""
NOTICED = ("killed", "timeout", "segfault", "suspicious")
UNNOTICED = ("survived", "no tests")
"""mutmut's verdicts on mutants that no test catches, and (NOTICED) on those that are caught. All others were interrupted."""
Z = 1.96
"""95 % of a normal distribution lies within this many standard deviations of the mean."""


@dataclass(frozen=True)
class Part:
    """The files to change, and the tests that should fail.

    Attributes:
        files: globs of source files.
        tests: pytest arguments that select the tests.
        but: files that belong to another part.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    but: tuple[str, ...] = ()


SERVERS = tuple(f"headway/brokers/redis/{name}.py" for name in ("clients", "failover", "link"))
"""Modules that connect to a single server, Sentinels or clusters."""
VALKEY = ("-k", "not redis] and not redis-")
"""One kind of server is enough, because the code under test is the same."""
PARTS = {
    "core": Part(("headway/core/*.py", "headway/core/policies/*.py"), ("tests/core",)),
    "brokers": Part(
        ("headway/brokers/*/*.py",),
        (
            "tests/contracts",
            "tests/redis",
            "--ignore-glob=*/test_backend.py",
            "--ignore-glob=*/test_key_stores.py",
            "--ignore-glob=*/test_ledgers.py",
            "--ignore-glob=*/redis/test_cluster.py",
            "--ignore-glob=*/redis/test_sentinel.py",
            *VALKEY,
        ),
        SERVERS,
    ),
    # Sentinels and clusters need many processes, which take seconds for each mutant.
    "servers": Part(SERVERS, ("tests/redis", *VALKEY)),
    "gateway": Part(
        ("headway/gateway/*.py", "headway/fleet/membership.py", "headway/runtime/availability.py"),
        # Requests that arrive at the API: where a request or task is, and what a caller may still ask.
        (
            "tests/services",
            "--ignore-glob=*/test_redis_budget.py",  # Code made mutable is slower.
            "tests/http/test_admin.py",
            "tests/http/test_admin_roles.py",
            "tests/http/test_quotas.py",
            "tests/http/test_tasks.py",
        ),
    ),
    "http": Part(
        ("headway/http/*.py", "headway/http/*/*.py", "headway/admin/*.py"),
        # Code made mutable takes more bytecodes.
        ("tests/http", "tests/services/test_readiness.py", "-k", "not no_step_of_the_dearest_bodies"),
    ),
}


def main() -> int:
    """Try the mutants. The exit status doesn't tell whether any survived."""
    parser = argparse.ArgumentParser(description="Whether the tests notice small changes of the code.")
    parser.add_argument("what", nargs="*", default=[FIRST], help=f"one of {', '.join(PARTS)}, or patterns of names")
    parser.add_argument("--sample", type=int, help="try so many, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=8, help="of the sample (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at the same time (default %(default)s)")
    options = parser.parse_args()
    part, *others = {_part_of(name) for name in options.what}
    if part is None or others:
        parser.error(f"{' '.join(options.what)} is not within one part of {', '.join(PARTS)}. Name one part at a time")
    _work_in(ROOT / "mutants" / part, PARTS[part])
    mutmut = importlib.import_module("mutmut.__main__")
    names = _made(mutmut, [name for name in options.what if name not in PARTS], options.jobs)
    if options.sample is not None and options.sample < len(names):
        names = sorted(random.Random(options.seed).sample(names, options.sample))
    # This check fails a test on purpose, and pytest then raises over the sockets left open. A score of 0 would tell the same.
    vars(mutmut)["run_forced_fail_test"] = lambda runner: None
    mutmut._run(names, options.jobs)
    _report(mutmut, names)
    return 0


def _part_of(name: str) -> str | None:
    if name in PARTS:
        return name
    literal = name.split("*")[0]
    for part, made_of in PARTS.items():
        for file in (file.relative_to(ROOT) for glob in made_of.files for file in ROOT.glob(glob)):
            module = ".".join(file.with_suffix("").parts)
            if str(file) in made_of.but:
                continue
            if literal.startswith(f"{module}.") or module.startswith(literal):
                return part
    return None


def _work_in(folder: Path, part: Part) -> None:
    """Set up the folder so that mutmut finds what it expects in the root, and configure the part."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    for name in ("pyproject.toml", "headway"):
        _link(name)
    configuration = importlib.import_module("mutmut.configuration").config()
    configuration.only_mutate, configuration.do_not_mutate = list(part.files), list(part.but)
    configuration.pytest_add_cli_args_test_selection = list(part.tests)
    configuration.on_dependency_change = "ignore"
    for path in configuration.also_copy:
        if (ROOT / path).exists():
            _link(str(path))
    # mutmut keeps earlier copies, even if the file has changed or is gone.
    shutil.rmtree("mutants/tests", ignore_errors=True)
    for path in Path("mutants/headway").rglob("*.lua"):
        path.unlink()


def _link(name: str) -> None:
    link = Path(name)
    if not link.is_symlink():
        link.symlink_to(ROOT / name)


def _made(mutmut: ModuleType, patterns: list[str], jobs: int) -> list[str]:
    """Make the mutants. Returns the names that match a pattern, or all."""
    mutmut.set_mutant_under_test("mutant_generation")
    Path("mutants").mkdir(exist_ok=True)
    with mutmut.CatchOutput(spinner_title="Making mutants"):
        mutmut.copy_src_dir()
        mutmut.create_mutants(jobs)
    mutants, _ = mutmut.collect_source_file_mutation_data(mutant_names=patterns)
    return sorted(name for _, name, _ in mutants)


def _report(mutmut: ModuleType, names: list[str]) -> None:
    mutants, _ = mutmut.collect_source_file_mutation_data(mutant_names=names)
    fates = {name: mutmut.status_by_exit_code[code] for _, name, code in mutants}
    lines = [""]
    for name, fate in sorted(fates.items()):
        if fate in UNNOTICED:
            lines += [f"{name}: {fate}", *filter(_changed, mutmut.get_diff_for_mutant(name).splitlines()), ""]
    counts = Counter(fates.values())
    noticed, unnoticed = (sum(counts[fate] for fate in some) for some in (NOTICED, UNNOTICED))
    tried = noticed + unnoticed
    low, high = _interval(noticed, tried)
    lines.append(", ".join(f"{count} {fate}" for fate, count in counts.most_common()))
    lines.append(f"{noticed} of {tried} noticed: {noticed / max(tried, 1):.1%} (95 % interval {low:.1%} to {high:.1%})")
    print("\n".join(lines))  # noqa: T201


def _changed(line: str) -> bool:
    return line.startswith(("+", "-")) and not line.startswith(("+++", "---"))


def _interval(hits: int, tries: int) -> tuple[float, float]:
    """Return the Wilson interval of the hit rate among all mutants."""
    if not tries:
        return 0.0, 1.0
    share, scale = hits / tries, 1.0 + Z * Z / tries
    middle = (share + Z * Z / (2 * tries)) / scale
    half = Z * math.sqrt(share * (1.0 - share) / tries + Z * Z / (4 * tries * tries)) / scale
    return middle - half, middle + half


if __name__ == "__main__":
    sys.exit(main())
