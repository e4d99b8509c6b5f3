"""Random tensors through every door of a running service, byte for byte what numpy says of them, and damaged ones.

HEADWAY_TEST_TENSORS is how many requests are made (1400), a fifth as many of them damaged, and HEADWAY_TEST_SEED the seed of all dice (1).
Every 4,000 go to other models.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.oip.tensors import CONTENTS
from tests.e2e import tensor_doors as at
from tests.e2e.client import request
from tests.e2e.server import Server, serving
from tests.e2e.tensor_doors import CLIENT, DTYPES, GRPC, HTTP, NAMES, OF_TEXT, Ask, Doors, Model, Refused, octets_of
from tests.servers.ports import Port
from tests.targets.arrays import answered

COUNT = int(os.environ.get("HEADWAY_TEST_TENSORS", "1400"))
SEED = int(os.environ.get("HEADWAY_TEST_SEED", "1"))
EACH = 4_000
THREADS = 6
MOST_ROWS = 16
BODY_BYTES = 8_000_000
STALL = 0.1
"""Most seconds that the service may compute between two answers to a probe."""
PIECES = (
    b"", b"[", b"]", b",", b"null", b"1e999", b"-1", b'"', b"{}", b"0", b"true", b"\xff", b"\0", b"FP16", b"JSON", b"99999999999999999999",
    b"\xff" * 9 + b"\1", b"\x80" * 11, b"\x0b", b"\x3a\0", b"NaN", b"[" * 40,
)  # fmt: skip
"""What damages a body."""


def models_of(rng: random.Random) -> list[Model]:
    """Models with one input, with some of which each door can have one, and with one of each datatype."""
    datatypes = list(DTYPES)
    some = {f"{place} é": rng.choice(list(CONTENTS)) for place in range(rng.randint(2, 4))}
    datatype, row = _spec(rng, rng.choice([one for one in datatypes if one != "BYTES"]))
    return [
        Model("solo", {"x": (datatype, [abs(one) if place else one for place, one in enumerate(row)])}, ["x"]),
        Model("some", {name: _spec(rng, one) for name, one in some.items()}, list(some)[: rng.randint(0, 1)]),
        Model("each", {f"of {one}": _spec(rng, one) for one in datatypes}, []),
    ]


def _spec(rng: random.Random, datatype: str) -> tuple[str, list[int]]:
    return datatype, [rng.choice([-1, -1, 1, 2, 3]) for _ in range(rng.randint(0, 3))]


def drawn(rng: random.Random, model: Model, door: str) -> Ask:
    """Request for a model as a door can carry it."""
    rows = rng.choice([1, 1, 1, 2, 3, rng.randint(1, MOST_ROWS)])
    dice = np.random.default_rng(rng.getrandbits(64))
    inputs = {}
    for name, (datatype, row) in model.specs.items():
        least = 0 if door != "octets" and rng.random() < 0.05 else 1
        large = 40 if len(row) > 1 else 900 if door in OF_TEXT else 150_000
        sizes = [
            rng.choice([least, 1, 2, 3, 11, large if rng.random() < 0.05 else 4]) if one < 0 else one for one in row
        ]
        if rows * math.prod(sizes) > (150_000 if model.name == "solo" else 20_000):
            sizes = [min(one, 4) for one in sizes]
        inputs[name] = numbers(dice, datatype, (rows, *sizes), plain=door in OF_TEXT, quiet=door == "gRPC typed")
    wanted = rng.sample(model.outputs, rng.randint(1, len(model.outputs))) if rng.random() < 0.2 else []
    if door in ("native JSON", "octets"):
        wanted = []
    return Ask(model, inputs, wanted, door == "native JSON" and rows == 1 and rng.random() < 0.5)


def numbers(dice: np.random.Generator, datatype: str, shape: tuple[int, ...], *, plain: bool, quiet: bool) -> Any:
    """Any numbers of a datatype; `plain`: such as JSON has; `quiet`: no NaN that becomes another when Python reads it."""
    kind = np.dtype(DTYPES[datatype])
    if datatype == "BYTES":
        texts = ["", "a", "é€", "two words", '\n"\\']
        octets = [one.encode() for one in texts] + ([] if plain else [b"\0", b"\xff\xfe"])
        found = np.empty(shape, object)
        found.ravel()[:] = [octets[place] for place in dice.integers(0, len(octets), found.size)]
        return found
    if datatype == "BOOL":
        return dice.integers(0, 2, shape).astype(bool)
    size = 2 if datatype == "BF16" else kind.itemsize
    bits = dice.integers(0, 1 << 8 * size, shape, dtype=f"u{size}")
    extremes = [0, (1 << 8 * size) - 1, 1 << 8 * size - 1, (1 << 8 * size - 1) - 1, 1]
    bits = np.where(dice.random(shape) < 0.1, dice.choice(np.array(extremes, bits.dtype), shape), bits)
    if datatype == "BF16":  # What rounds to it makes NaN quiet, as processors do.
        bits = np.where(bits & 0x7FFF > 0x7F80, bits | 0x40, bits)
    if datatype == "FP32" and quiet:
        bits = np.where(bits & 0x7FFFFFFF > 0x7F800000, bits | 0x400000, bits)
    array = (bits.astype("<u4") << 16).view("<f4") if datatype == "BF16" else bits.view(kind)
    if plain and kind.kind == "f":
        array = np.where(np.isfinite(array), array, dice.choice(np.array([0.1, -0.0, 3.0], kind), shape)).astype(kind)
        array = array if datatype != "BF16" else _of_bf16(array)
    return array


def _of_bf16(array: Any) -> Any:
    return (array.view("<u4") & np.uint32(0xFFFF0000)).view("<f4")


def carries(door: str, ask: Ask) -> bool:
    """Whether a door can carry a request."""
    datatypes = {datatype for datatype, _ in ask.model.specs.values()}
    if door == "octets":
        [(name, array)] = ask.inputs.items()
        return array.size > 0 and (-1 not in ask.model.specs[name][1] or len(array) == 1)
    if door == "native JSON":  # Nested lists do not tell the axes behind an empty one.
        return not any(0 in one.shape[:-1] for one in ask.inputs.values())
    if door == CLIENT:
        return "BF16" not in datatypes
    return door != "gRPC typed" or datatypes <= set(CONTENTS)


def expected(ask: Ask) -> at.Outputs:
    """What numpy says."""
    found = answered(ask.inputs, ask.model.lone)
    names = at.told_names(ask)
    return {name: (found[name].shape, octets_of(found[name], ask.model.datatype(name))) for name in names}


def is_endless(outputs: at.Outputs, model: Model) -> bool:
    """Whether a number of these has no form in JSON."""
    for name, (_, data) in outputs.items():
        datatype = model.datatype(name)
        if datatype == "BF16":
            data = (np.frombuffer(data, "<u2").astype("<u4") << 16).tobytes()
        is_float = datatype.endswith(("16", "32", "64")) and datatype.startswith(("BF", "FP"))
        if is_float and not np.isfinite(np.frombuffer(data, DTYPES[datatype])).all():
            return True
    return False


@contextlib.contextmanager
def service(folder: Path, models: Sequence[Model]) -> Iterator[Server]:
    """Service with models."""
    (folder / "told.json").write_text(json.dumps({one.name: (one.specs, one.lone) for one in models}))
    target, *others = (f"{one.name}=tests.targets.arrays:Told({one.name!r})" for one in models)
    with contextlib.closing(Port()) as port:
        flags = "--grpc-port", str(port.number), "--max-batch-size", str(MOST_ROWS), "--max-body-bytes", str(BODY_BYTES)
        with serving(folder, *others, *flags, target=target, lawful=False) as server:
            yield server


def together(server: Server, count: int, seed: int, ask: Callable[[random.Random, Doors], str]) -> Counter[str]:
    """Counts of what so many calls return, made by some threads at once."""
    told, failures = list[str](), list[BaseException]()

    def work(number: int) -> None:
        rng, doors = random.Random(f"{seed} {number}"), Doors(server.port, server.grpc_port)
        try:
            for _ in range(count // THREADS + 1):
                if failures:
                    break
                told.append(ask(rng, doors))
        except BaseException as exc:
            failures.append(exc)
        finally:
            doors.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return Counter(told)


def some_ask(rng: random.Random, models: Sequence[Model], doors: Sequence[str] = NAMES) -> tuple[str, Ask]:
    """A request, and the door for it."""
    door = rng.choice(doors)
    while True:
        ask = drawn(rng, models[0] if door == "octets" else rng.choice(models), door)
        if carries(door, ask):
            return door, ask


@pytest.mark.parametrize("turn", range(-(-COUNT // EACH)))
def test_tensors_come_back_through_every_door_as_numpy_has_them(tmp_path: Path, turn: int) -> None:
    models = models_of(random.Random(f"{SEED} {turn}"))
    asked_rows: list[tuple[str, int]] = []

    def ask(rng: random.Random, doors: Doors) -> str:
        door, asked = some_ask(rng, models)
        due = expected(asked)
        where = f"{door}: {asked.model}, {[(name, one.shape) for name, one in asked.inputs.items()]}, {asked.wanted}"
        asked_rows.append((asked.model.name, len(next(iter(asked.inputs.values())))))
        try:
            found = at.through(doors, door, asked)
        except Refused as exc:
            assert exc.status == 502 and "JSON has not" in exc.text, f"{where}: {exc}"
            assert door in OF_TEXT and is_endless(due, asked.model), f"{where}: {exc}"
            return f"{door}, no JSON"
        except Exception as exc:
            raise AssertionError(where) from exc
        for name, (shape, data) in due.items():
            told, octets = found[name]
            assert told in (None, shape), f"{where}: {name} is of shape {told}"
            assert octets == data, f"{where}: {name}"
        assert len(found) == len(due)
        return door

    with service(tmp_path, models) as server:
        counts = together(server, min(COUNT, EACH), SEED + turn, ask)
        ran = {one.name: server.metrics().value("batch_size_sum", model=one.name) for one in models}
    assert ran == {name: sum(rows for model, rows in asked_rows if model == name) for name in ran}
    assert set(counts) >= set(NAMES)


@pytest.mark.parametrize("turn", range(-(-COUNT // EACH)))
def test_damaged_tensors_are_refused_or_answered_and_hold_up_nobody(tmp_path: Path, turn: int) -> None:
    models = models_of(random.Random(f"damaged {SEED} {turn}"))

    def ask(rng: random.Random, doors: Doors) -> str:
        door, asked = some_ask(rng, models, (*HTTP, *GRPC))
        lists = {name: ragged(one) for name, one in asked.inputs.items() if door == "native JSON"}
        if lists and None not in lists.values():
            body = json.dumps(
                {"model": asked.model.name, "input": lists if len(lists) > 1 else lists.popitem()[1]}
            ).encode()
            with pytest.raises(Refused, match="400"):
                doors.ask_http(request(body))
        if door in GRPC:
            body = damaged(rng, GRPC[door](asked))
        else:
            head, _, body = HTTP[door][0](asked).partition(b"\r\n\r\n")
            body = damaged(rng, body)
            path, fields = head.decode().split("\r\n")[0].split()[1], [
                one for one in head.decode().split("\r\n")[1:] if not one.startswith(("Content-Length", "Host"))
            ]  # fmt: skip
            body = request(body, path, *fields)
        try:
            doors.ask_grpc(body) if door in GRPC else doors.ask_http(body)
        except Refused as exc:
            assert exc.status in (400, 404, 413, 422), f"{door}: {exc}"
            return f"{door}, {exc.status}"
        return door

    with service(tmp_path, models) as server, probing(server) as stalls:
        counts = together(server, min(COUNT, EACH) // 5, SEED + turn, ask)
        assert [one["restarts"] for one in server.workers()] == [0] * len(models)
    assert not stalls
    assert {one.partition(",")[0] for one in counts} == {*HTTP, *GRPC}


def ragged(array: Any) -> Any:
    """Nested lists of an array, one of which lacks its last element; None where it has no two of them."""
    if array.ndim < 2 or 0 in array.shape or array.size == array.shape[-1]:
        return None
    nested = inner = at.listed(array)
    while isinstance(inner[0], list):
        inner = inner[0]
    inner.pop()
    return nested


def damaged(rng: random.Random, body: bytes) -> bytes:
    """Body that is damaged in some places."""
    found = bytearray(body)
    for _ in range(rng.randint(1, 3)):
        place = rng.randint(0, min(len(found), rng.choice([100, 1000, len(found)])))
        found[place : place + rng.randint(0, 3)] = rng.choice(PIECES)
    return bytes(found)


@contextlib.contextmanager
def probing(server: Server) -> Iterator[list[float]]:
    """Times that the service computed for longer than STALL before it answered a probe; others' use of the machine does not count."""
    stalls, ended, connection = list[float](), threading.Event(), server.connect()

    def computed() -> float:
        return int(Path(f"/proc/{server.process.pid}/schedstat").read_text().split()[0]) / 1e9

    def probe() -> None:
        while not ended.wait(0.005):
            before, since = computed(), time.monotonic()
            connection.send(b"GET /livez HTTP/1.1\r\nHost: e2e\r\n\r\n")
            assert connection.answer().status == 200
            if time.monotonic() - since > STALL and computed() - before > STALL:
                stalls.append(time.monotonic() - since)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield stalls
    finally:
        ended.set()
        thread.join()
