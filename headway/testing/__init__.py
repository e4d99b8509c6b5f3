"""Test targets with Headway's real queue, batcher and checks.

    from headway.testing import batched

    def test_upper():
        with batched(upper, max_batch_size=4) as run:
            assert run("a") == "A"
            assert run.many(["b", "c"]) == ["B", "C"]
            assert run.batches == [["a"], ["b", "c"]]

Everything works as in `headway serve`, so a test gets the same outputs and errors as a client. No port is opened.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from headway.app.serving import TargetLike, Value, refuse_in_worker, start, target_of
from headway.client.errors import ApiError
from headway.client.messages import Answer, Request, check_inputs, inference, read_error, read_result
from headway.config import Settings, load_arguments
from headway.config.target import FileTarget, ModuleTarget, ObservedTarget, RemoteTarget, Target
from headway.errors import TargetError
from headway.http.server.memory_listener import MemoryListener

_PATIENT: Mapping[str, Value] = {  # Defaults that let tests pass even on a busy machine.
    "queue_timeout_ms": 60_000.0,
    "request_timeout_ms": 60_000.0,
    "gpu_timeout_ms": 60_000.0,
    "max_connections": 1_000_000,
    "log_level": "warning",
}

__all__ = ["BatchedTarget", "batched"]


def batched(target: TargetLike, *, process: bool = False, **settings: Value) -> BatchedTarget:
    """Run a target with the real batcher in a `with` block. See `headway.testing` for an example.

    Arguments:
        target: function, class, `functools.partial` of a class, other callable, or string as for `headway serve`. A target named by
            a string always runs in a worker process.
        process: True to run the target in a worker process, as in production. The worker imports the target by name, so a script
            must make this call under `if __name__ == "__main__":`. If False, the target runs in a thread of this process. It
            can be any function, and a test can mock objects that it uses, but a deadline can't stop it.
        settings: settings by name. The environment and `headway.toml` are ignored, and timeouts default to 60 s.

    Raises:
        SettingError: a setting is unknown or invalid.
        TargetError: the target can't be loaded or breaks the rules. Raised on entering the block.
    """
    values = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    if "request_timeout_ms" in values:
        values.setdefault("queue_timeout_ms", values["request_timeout_ms"])
    loaded = load_arguments({**_PATIENT, **values})
    return BatchedTarget(loaded, _subject(target, process))


def _subject(target: TargetLike, process: bool) -> Any:
    if process or isinstance(target, str):
        refuse_in_worker("headway.testing.batched")
        parsed: Target = target_of(target)
        if isinstance(parsed, ModuleTarget | FileTarget):
            return parsed
        kind = "a remote API" if isinstance(parsed, RemoteTarget) else "not a target of a worker"
        raise TargetError(f"target {parsed}: it is {kind}. Test a function or a class.")
    if isinstance(target, functools.partial) and isinstance(target.func, type):
        return _with_arguments(target.func, target.args, target.keywords)
    if not callable(target):
        raise TargetError(f"target {type(target).__name__}: it cannot be called. Pass a function or a class.")
    return target


def _with_arguments(cls: type, arguments: Sequence[Any], named: Mapping[str, Any]) -> type:
    """Return a subclass of `cls` whose constructor takes no arguments, and passes the given ones to `cls`."""

    def built(self: Any) -> None:
        cls.__init__(self, *arguments, **named)  # type: ignore[misc]

    return type(cls.__name__, (cls,), {"__init__": built, "__qualname__": cls.__qualname__})


class BatchedTarget:
    """A target with its batcher, returned by `batched`. Call it with an input inside a `with` block. `batches` lists the inputs of each
    batch in run order, except for the warm-up batch. Inputs of a failed batch appear again whenever they are run again."""

    def __init__(self, settings: Settings, subject: Any) -> None:
        self.batches: list[list[Any]] = []
        self._settings = settings
        self._target = ObservedTarget(subject, self.batches)

    def __enter__(self) -> Self:
        self._service = start(self._settings, self._target, MemoryListener)
        return self

    def __exit__(self, *raised: object) -> None:
        self._service.stop(drain=False)

    def __call__(self, input: Any, parameters: Mapping[str, Any] | None = None) -> Any:
        """Return the output for an input. Raises the same ApiError as a client, such as RejectedByModel."""
        return self.many([input], parameters)[0]

    def many(
        self, inputs: Iterable[Any], parameters: Mapping[str, Any] | None = None, *, return_errors: bool = False
    ) -> list[Any]:
        """Return the outputs for several inputs that arrive together, in their order. `parameters` apply to all of them. Raises the
        first ApiError or, if `return_errors`, puts errors into the list in place of outputs."""
        requests = [inference(input, None, parameters, "") for input in check_inputs(inputs)]
        answers = self._service.call(self._ask(requests))
        outcomes = [read_result(answer).output if answer.status == 200 else read_error(answer) for answer in answers]
        if not return_errors:
            for outcome in outcomes:
                if isinstance(outcome, ApiError):
                    raise outcome
        return outcomes

    async def _ask(self, requests: Sequence[Request]) -> list[Answer]:
        listener = self._service.process.public
        assert isinstance(listener, MemoryListener)  # noqa: S101 - it was built with one
        sent = [listener.ask(request.method, request.path, request.header, request.body or b"") for request in requests]
        return [Answer(answer.status, answer.header, answer.body) for answer in await asyncio.gather(*sent)]
