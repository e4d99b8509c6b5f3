"""Arrays between a worker process and its host, by arena or pipe, and what warm-up batches reveal about them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.backends.process.array_kind import LIST, ArrayKind
from headway.backends.process.usercode import Target, UserLoop
from headway.config.target import FileTarget, ModuleTarget
from headway.core.tensors import Tensor, TensorHead, pack, unpack
from headway.errors import WorkerCrashed
from headway.model import ItemResult, RowsTogether, Tensors, TensorSpec
from tests.backends.entries import batch
from tests.backends.worker_process import LONG, started
from tests.targets import arrays

pytestmark = pytest.mark.processes


def named(name: str) -> ModuleTarget:
    return ModuleTarget("tests.targets.arrays", name)


def value(array: np.ndarray[Any, Any], name: str = "x") -> Tensors:
    return pack([Tensor(TensorHead(name, "FP32", array.shape), array.astype("<f4").tobytes())])


def read(item: ItemResult) -> dict[str, list[Any]]:
    assert isinstance(item.output, Tensors), item
    return {x.head.name: np.frombuffer(x.data, "<f4").reshape(x.head.shape).tolist() for x in unpack(item.output)}


@pytest.mark.parametrize("arena_bytes", [0, 3 << 20])
async def test_large_arrays_come_back_as_they_were(arena_bytes: int) -> None:
    counted: list[tuple[str, bool]] = []
    rows = np.arange(300_000, dtype="f4").reshape(2, -1)
    settings = {"arena_bytes": arena_bytes, "count": lambda way, placed: counted.append((way, placed))}
    async with started(named("Same"), **settings) as (backend, _):
        for values in ([value(rows)], [value(rows[:1]), value(rows)], [value(rows[:, :5])]):
            assert [item.output for item in await backend.run(batch(*values), LONG)] == values
    assert {placed for way, placed in counted if way == "out"} == ({True, False} if arena_bytes else set())


async def test_arrays_that_are_kept_are_not_written_over() -> None:
    async with started(named("Kept"), arena_bytes=4 << 20) as (backend, log):
        for number, before in ((1.0, 0.0), (2.0, 1.0), (3.0, 2.0)):
            [item] = await backend.run(batch(value(np.full((1, 50_000), number))), LONG)
            assert read(item) == {"mean": [number], "before": [before]}
        assert "array.copy()" in str(log.events)


async def test_warm_up_batches_tell_of_outputs_and_have_as_many_rows() -> None:
    async with started(named("Sums"), max_batch=8) as (backend, _):
        assert backend.signature.inputs == (TensorSpec("INPUT", "FP32", (4,)),)
        assert backend.signature.outputs == (TensorSpec("OUTPUT", "FP32", (1,)),)
        assert [size for size, _ in backend.warm_up][-1] == 8


def test_a_target_tells_which_rows_run_in_one_call() -> None:
    for target, together in (
        (arrays.Ranked(), RowsTogether.SHAPE),
        (arrays.Padded(), RowsTogether.PADDED),
        (arrays.Image(), RowsTogether.ANY),
    ):
        assert Target(target, "t", "", UserLoop()).signature.together is together
    assert ArrayKind(LIST, True, (TensorSpec("x", "FP32", (-1,)),)).together is RowsTogether.ANY


async def test_outputs_of_free_axes_are_free() -> None:
    async with started(named("Cuts")) as (backend, _):
        assert backend.signature.outputs == (TensorSpec("OUTPUT", "FP32", (-1,)),)


async def test_tensors_that_are_none_end_the_process_that_sent_them() -> None:
    async with started(named("Forges"), arena_bytes=1 << 20) as (backend, _):
        with pytest.raises(WorkerCrashed, match="sent a wrong answer"):
            await backend.run(batch(value(np.ones((1, 1)))), LONG)


async def test_a_target_of_texts_starts_without_what_arrays_need(tmp_path: Path) -> None:
    lines = (
        "import sys\ndef f(texts: list[str]) -> list[str]:\n"
        "    return [','.join(n for n in sys.modules if n.startswith(('numpy', 'headway.backends.process.array_')))] * len(texts)\n"
    )
    (tmp_path / "bare.py").write_text(lines)
    async with started(FileTarget(tmp_path / "bare.py", "f")) as (backend, _):
        assert await backend.run(batch("a"), LONG) == [ItemResult("")]
