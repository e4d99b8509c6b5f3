"""Client for threads, and its tasks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from headway.client.arrays import inference_of, several
from headway.client.call import Attempt, Call, Polling
from headway.client.errors import ClientError, NotFound
from headway.client.messages import (
    Answer,
    Request,
    Result,
    State,
    forget,
    poll,
    read_outcome,
    read_task,
    task,
)
from headway.client.reaching import lost, unreachable
from headway.client.service import AnyClient, AnyTask, check_seconds

if TYPE_CHECKING:
    from urllib3 import PoolManager

CONCURRENCY = 64
"""Requests of `infer_many` at once, unless it says otherwise."""


class Client(AnyClient):
    """Client of a Headway service. One client serves all threads of a process; it keeps its connections open.

        with headway.Client("http://127.0.0.1:8000") as client:
            print(client.infer("hello").output)

    Each request is sent under an idempotency key of its own, so that sending it again, after a refusal or a lost
    connection, never runs it twice. A refusal that says when to come back is taken at its word.

    Arguments:
        url: address of the service.
        api_key: API key or JSON Web Token; None: none is sent.
        timeout: seconds for a call in all, retries and pauses included, unless the call says otherwise. The service
            is told of it, and may allow less.
        retries: most further attempts of a call. With 0 a request is sent once, without an idempotency key.
        connections: most connections at once; further calls wait for one.
        headers: further header fields of every request.
        ssl_context: certificates to trust, where the system's will not do.

    Raises:
        InvalidArgument: an argument cannot be used.
    """

    def _begin(self) -> None:
        self._header = self._service.header
        self._making = threading.Lock()
        self._pool: PoolManager | None = None
        self._pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections. Calls that come later raise RuntimeError."""
        self._closed = True
        with self._making:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.clear()

    def infer(
        self,
        input: Any,
        model: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        *,
        idempotency_key: str | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Result:
        """Answer of the model to one input.

        Arguments:
            input: a string, or any JSON value where the target takes one. Or an array of numpy, or a dict of several by name,
                whose first axis is that of the rows; the output is then an array, or a dict of several.
            model: name of the model; None: the service's only or default one.
            parameters: parameters of this input, a JSON object.
            timeout: seconds for the call in all; None: the client's.
            idempotency_key: a key of the caller's own, for requests that another process may send again.
            outputs: names of the outputs that are wanted, of arrays; None: all.

        Raises:
            ClientError: there is no answer, or it is an error; see `headway.client.errors`.
            InvalidInput: the input or the parameters are no JSON, or an array cannot be sent; it is a TypeError and a ValueError, too.
        """
        request, read = inference_of(input, model, parameters, self._service.key(idempotency_key), outputs)
        return read(self._send(request, self._service.seconds(timeout)))

    @overload
    def infer_many(
        self,
        inputs: Iterable[Any],
        model: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        *,
        concurrency: int = CONCURRENCY,
        return_errors: Literal[False] = False,
        outputs: Sequence[str] | None = None,
    ) -> list[Result]: ...

    @overload
    def infer_many(
        self,
        inputs: Iterable[Any],
        model: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        *,
        concurrency: int = CONCURRENCY,
        return_errors: Literal[True],
        outputs: Sequence[str] | None = None,
    ) -> list[Result | ClientError]: ...

    def infer_many(
        self,
        inputs: Iterable[Any],
        model: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        *,
        concurrency: int = CONCURRENCY,
        return_errors: bool = False,
        outputs: Sequence[str] | None = None,
    ) -> list[Result] | list[Result | ClientError]:
        """Answers to several inputs, in their order, each asked for by a request of its own.

        Arguments:
            inputs: a list of inputs, or another iterable of them, but not one text. Of an array each row is an input, and its
                output is the row of the output, without an axis of rows.
            model: name of the model; None: the service's only or default one.
            parameters: parameters of each input, a JSON object.
            timeout: seconds for each input, from when it is first sent; None: the client's. A refusal that says when to come
                back, as of a rate limit, is waited out within them, and is none of the client's `retries`.
            concurrency: most requests at once.
            return_errors: whether an input that fails has its error in the list. If not, the first error ends the
                call, as soon as what is on its way is done; what has not been sent by then is not sent.
            outputs: names of the outputs that are wanted, of arrays; None: all.

        Raises:
            ClientError: an input has no answer, and `return_errors` is False; of several errors the first by the inputs'
                order. Its `input_index` is the place of its input.
            InvalidInput: `inputs` is one text, octets or a dict; nothing was sent.
            ValueError: `concurrency` is below 1; nothing was sent.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency = {concurrency}: must be at least 1")
        seconds = self._service.seconds(timeout)
        each, result_of = several(inputs)

        def ask(index: int, input: Any) -> Result:
            try:
                request, read = inference_of(input, model, parameters, self._service.key(None), outputs)
                return result_of(read(self._run(self._service.call(request, seconds, patient=True))))
            except ClientError as error:
                error.locate(index, each)
                raise

        threads = ThreadPoolExecutor(min(concurrency, self._service.connections), "headway-client")
        finished = False
        try:
            asked = [threads.submit(ask, index, input) for index, input in enumerate(each)]
            wait(asked, return_when=ALL_COMPLETED if return_errors else FIRST_EXCEPTION)
            finished = True
        finally:  # Who is interrupted waits for nothing.
            threads.shutdown(wait=finished, cancel_futures=True)
        if return_errors:
            return [_outcome(one) for one in asked]
        _raise_first(asked)
        return [one.result() for one in asked]

    def submit(
        self,
        input: Any,
        model: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        *,
        idempotency_key: str | None = None,
    ) -> Task:
        """Submit an input as a task, whose result is asked for later. Returns as soon as it is queued.

        Arguments:
            input: a string, or any JSON value where the target takes one.
            model: name of the model; None: the service's only or default one.
            parameters: parameters of this input, a JSON object.
            timeout: seconds that the task may take in all; None: as many as the service allows.
            idempotency_key: a key of the caller's own, for requests that another process may send again.

        Raises:
            ClientError: the task was not accepted.
            InvalidInput: the input or the parameters are no JSON; it is a TypeError and a ValueError, too.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        request = task(input, model, parameters, self._service.key(idempotency_key), timeout)
        return Task(self, read_task(self._send(request, self._service.timeout)))

    def task(self, id: str) -> Task:
        """Task that was submitted before, perhaps by another process. No request is made."""
        return Task(self, id)

    def _send(self, request: Request, timeout: float) -> Answer:
        return self._run(self._service.call(request, timeout))

    def _run(self, call: Call) -> Answer:
        """Make attempts until the call has its answer."""
        while True:
            attempt = call.attempt(time.monotonic())
            try:
                answer = self._exchange(call, attempt)
            except ClientError as error:
                pause = call.failed(error, time.monotonic())
            else:
                again = call.answered(answer, time.monotonic())
                if again is None:
                    return answer
                pause = again
            time.sleep(pause)

    def _exchange(self, call: Call, attempt: Attempt) -> Answer:
        """Make one attempt.

        Raises:
            Unreachable, TimedOut: there is no answer.
        """
        import urllib3
        from urllib3 import exceptions

        request = call.request
        try:
            response = self._connections().urlopen(
                request.method,
                self._service.base + request.path,
                body=request.body,
                headers={**self._header, **request.header, **attempt.header},
                timeout=urllib3.Timeout(connect=attempt.connect, read=attempt.read),
                pool_timeout=attempt.read,
                retries=False,
                redirect=False,
            )
        except (exceptions.ReadTimeoutError, exceptions.EmptyPoolError) as exc:
            raise call.overdue() from exc
        except (exceptions.ConnectTimeoutError, exceptions.NewConnectionError, exceptions.ProxyError) as exc:
            raise unreachable(self._service.url, exc) from exc
        except (exceptions.HTTPError, OSError) as exc:
            raise lost(self._service.url, exc) from exc
        return Answer(response.status, response.headers, response.data)

    def _connections(self) -> PoolManager:
        """Connections of this process: a process that was forked off must not use those of its parent."""
        pool = self._pool
        if pool is not None and self._pid == os.getpid():
            return pool
        with self._making:
            if self._closed:
                raise RuntimeError("the client is closed")
            if self._pool is None or self._pid != os.getpid():
                self._pool = self._made_pool()
                self._pid = os.getpid()
            return self._pool

    def _made_pool(self) -> PoolManager:
        import urllib3

        proxy = self._service.proxy
        how: dict[str, Any] = {"num_pools": 1, "maxsize": self._service.connections, "block": True}
        if self._service.ssl_context is not None:
            how["ssl_context"] = self._service.ssl_context
        return urllib3.PoolManager(**how) if proxy is None else urllib3.ProxyManager(proxy, **how)


class Task(AnyTask["Client"]):
    """Task of a service: an input whose result is asked for later.

    Attributes:
        id: id of the task, by which any client of its tenant finds it: `client.task(id)`.
    """

    def status(self) -> State:
        """State of the task.

        Raises:
            NotFound: the task is unknown, or its outcome is no longer kept.
        """
        status, _ = read_outcome(self._client._send(poll(self.id, 0.0), self._client._service.timeout))
        return status

    def result(self, timeout: float | None = None) -> Result:
        """Result of the task, waited for.

        Arguments:
            timeout: seconds after which to give up waiting; the task goes on. None: wait until there is an outcome.

        Raises:
            ApiError: the task failed; or it is unknown, or its outcome no longer kept (NotFound).
            TimedOut: there is no outcome yet.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        polling = Polling(self.id, timeout, time.monotonic())
        while True:
            request, seconds = polling.next(time.monotonic())
            answer = self._client._send(request, seconds)
            found = polling.answered(answer, time.monotonic())
            if isinstance(found, Result):
                return found
            time.sleep(found)

    def cancel(self) -> None:
        """Cancel the task and forget its outcome. If it is not on a GPU yet, it never gets there.

        Nothing happens to a task that is unknown, or forgotten already.
        """
        with contextlib.suppress(NotFound):
            self._client._send(forget(self.id), self._client._service.timeout)


def _outcome(asked: Future[Result]) -> Result | ClientError:
    try:
        return asked.result()
    except ClientError as error:
        return error


def _raise_first(asked: list[Future[Result]]) -> None:
    for one in asked:
        if one.done() and not one.cancelled() and (error := one.exception()) is not None:
            raise error
