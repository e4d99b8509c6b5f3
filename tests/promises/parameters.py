"""Call parameters: all inputs in a call have the same ones.

The clients know which parameters they sent with each input, so this doesn't rely on what the model function reports.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from headway.core.batch_cost import MOST_CALLS
from tests.promises.operation import ASKS, BAD, History, Run, Violation, canonical


def parameters(history: History) -> Iterator[Violation]:
    """Find calls that mix requests with different parameters, and calls with other parameters than their requests."""
    asked = _asked(history)
    for run in history.runs:
        wanted = {text: asked[text] for text in run.inputs if text in asked}
        if not wanted:
            continue
        story = f"{run.name} with {run.parameters or 'none'}: {str(wanted)[:400]}"
        if _mixes(run, asked):
            yield Violation("other parameters in one call", story)
        elif any(run.parameters not in values for values in wanted.values()):
            yield Violation("a call with parameters that its requests have not", story)


def figures(history: History) -> tuple[int, Counter[str], int]:
    """Return the number of calls, the inputs that ran in them by parameters, and the number of mixed calls."""
    asked = _asked(history)
    inputs = Counter[str]()
    for run in history.runs:
        inputs[run.parameters] += len(run.inputs)
    return len(history.runs), inputs, sum(_mixes(run, asked) for run in history.runs)


def _asked(history: History) -> Mapping[str, set[str]]:
    """Return the parameters that each input was sent with."""
    asked: dict[str, set[str]] = defaultdict(set)
    for operation in history.operations:
        if operation.kind in ASKS:
            for text in operation.texts:
                asked[text].add(operation.values)
    for job in history.jobs:
        for custom_id, texts in job.lines.items():
            for text in texts:
                asked[text].add(canonical(job.parameters.get(custom_id, "")))
    return dict(asked)


def _mixes(run: Run, asked: Mapping[str, set[str]]) -> bool:
    """Return True if no parameters fit all inputs."""
    wanted = [asked[text] for text in run.inputs if text in asked]
    return bool(wanted) and not set.intersection(*wanted)


def ran_in_vain(runs: Sequence[Run]) -> set[str]:
    """Return the names of calls that finished and ran again because a later call of the same batch raised. Nothing
    records which calls belong to a batch. They run one after the other, at most MOST_CALLS for each value of the
    parameters."""
    by_process: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_process[run.name.rpartition(".")[0]].append(run)
    found = set[str]()
    for process, calls in by_process.items():
        calls = sorted(calls, key=lambda run: int(run.name.rpartition(".")[2])) if process else []
        for place, call in enumerate(calls):
            if call.ended is None and any(text.startswith(BAD[1]) for text in call.inputs):
                before = place
                while (
                    before and calls[before - 1].ended is not None and _may_be_one_batch(calls[before - 1 : place + 1])
                ):
                    before -= 1
                found.update(run.name for run in calls[before:place])
    return found


def _may_be_one_batch(calls: Sequence[Run]) -> bool:
    blocks = [(values, len(list(block))) for values, block in groupby(calls, key=lambda run: run.parameters)]
    return len({values for values, _ in blocks}) == len(blocks) and all(count <= MOST_CALLS for _, count in blocks)
