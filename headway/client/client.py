"""Client for threads, and the tasks it submits."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from headway.client.arrays import inference_of, several
from headway.client.errors import ClientError, NotFound, lost, unreachable
from headway.client.messages import Answer, Request, Result, State, forget, poll, read_outcome, read_task, task
from headway.client.service import AnyClient, AnyTask, Attempt, Call, Polling

if TYPE_CHECKING:
    from urllib3 import PoolManager

CONCURRENCY = 64


class Client(AnyClient):
    """Client of a Headway service. All threads of a process can share one client, which keeps its connections open.

        with headway.Client("http://127.0.0.1:8000") as client:
            print(client.infer("hello").output)

    Each request has its own idempotency key, so a retry after a refusal or a lost connection never runs it twice. If a
    refusal says when to retry, the client waits until then. Raises InvalidArgument if an argument is unusable.

    Arguments:
        url: address of the service, including any path that a proxy puts before the routes.
        api_key: API key or JSON Web Token, or None.
        timeout: time limit of a call in seconds, including retries and pauses. The service may allow less.
        retries: maximum number of retries per call. If 0, a request is sent once, without an idempotency key.
        connections: maximum number of open connections. While all are in use, further calls wait.
        headers: header fields to add to every request.
        ssl_context: certificates to trust, instead of the system's.
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
        """Close all connections. Later calls raise RuntimeError."""
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
        """Run the model on one input.

        Arguments:
            input: a string or any other JSON value that the target accepts; or a NumPy array, or a dict of arrays by name.
                The first axis of an array must be the rows. Arrays are answered with an array or a dict of arrays.
            model: None for the service's only or default model.
            parameters: a JSON object for this input.
            timeout: time limit of the call in seconds; None for the client's `timeout`.
            idempotency_key: your own key, for requests that another process may send again.
            outputs: names of the output arrays to return; None for all.

        Raises:
            ClientError: there was no answer, or the answer was an error; see `headway.client.errors`.
            InvalidInput: the input cannot be sent (also a TypeError and a ValueError).
        """
        request, read = inference_of(input, model, parameters, self._service.key(idempotency_key), outputs)
        return read(self._send(request, self._service.seconds(timeout)))

    @overload
    def infer_many(
        self, inputs: Iterable[Any], model: str | None = None, parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None, *, concurrency: int = CONCURRENCY, return_errors: Literal[False] = False,
        outputs: Sequence[str] | None = None,
    ) -> list[Result]: ...  # fmt: skip

    @overload
    def infer_many(
        self, inputs: Iterable[Any], model: str | None = None, parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None, *, concurrency: int = CONCURRENCY, return_errors: Literal[True],
        outputs: Sequence[str] | None = None,
    ) -> list[Result | ClientError]: ...  # fmt: skip

    def infer_many(
        self, inputs: Iterable[Any], model: str | None = None, parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None, *, concurrency: int = CONCURRENCY, return_errors: bool = False,
        outputs: Sequence[str] | None = None,
    ) -> list[Result] | list[Result | ClientError]:  # fmt: skip
        """Run the model on several inputs, one request each, and return the results in their order.

        Arguments:
            inputs: an iterable of inputs, or an array whose rows are the inputs. The output for a row has no row axis.
            model: None for the service's only or default model.
            parameters: a JSON object, the same for all inputs.
            timeout: time limit of each input in seconds, from its first attempt; None for the client's `timeout`. If
                a refusal says when to retry, the client waits if time allows. Such retries don't count towards `retries`.
            concurrency: maximum number of concurrent requests.
            return_errors: True to return the error of a failed input in its place. Otherwise, the client sends no further requests
                after an error, and raises the error once the requests in flight are done.
            outputs: names of the output arrays to return; None for all.

        Raises:
            ClientError: the first error in the order of the inputs, unless `return_errors` is True; see its `input_index`.
            InvalidInput: `inputs` is a string, bytes or a dict; nothing was sent.
            ValueError: `concurrency` is below 1; nothing was sent.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency = {concurrency}: must be at least 1")
        seconds = self._service.seconds(timeout)
        split, result_of = several(inputs)

        def ask(index: int, input: Any) -> Result:
            try:
                request, read = inference_of(input, model, parameters, self._service.key(None), outputs)
                return result_of(read(self._run(self._service.call(request, seconds, patient=True))))
            except ClientError as error:
                error.locate(index, split)
                raise

        threads = ThreadPoolExecutor(min(concurrency, self._service.connections), "headway-client")
        finished = False
        try:
            futures = [threads.submit(ask, index, input) for index, input in enumerate(split)]
            wait(futures, return_when=ALL_COMPLETED if return_errors else FIRST_EXCEPTION)
            finished = True
        finally:  # An interrupted caller must not wait for the requests in flight.
            threads.shutdown(wait=finished, cancel_futures=True)
        # The threads take the inputs in order, so the failed input comes before the cancelled ones.
        return [_outcome(future) for future in futures] if return_errors else [future.result() for future in futures]

    def submit(
        self,
        input: Any,
        model: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        *,
        idempotency_key: str | None = None,
    ) -> Task:
        """Submit an input as a task. Return the task once the service has queued it.

        The arguments are those of `infer`, except that `input` can't contain arrays, and that `timeout` is the time limit
        of the task in seconds; None for the maximum that the service allows.

        Raises:
            ClientError: the task was not accepted.
            InvalidInput: the input or the parameters are not JSON (also a TypeError and a ValueError).
        """
        request = task(input, model, parameters, self._service.key(idempotency_key), timeout)
        return Task(self, read_task(self._send(request, self._service.timeout)))

    def task(self, id: str) -> Task:
        """Return the task with this id, which another process may have submitted. No request is sent."""
        return Task(self, id)

    def _send(self, request: Request, timeout: float) -> Answer:
        return self._run(self._service.call(request, timeout))

    def _run(self, call: Call) -> Answer:
        while True:
            attempt = call.attempt(time.monotonic())
            pause: float | None
            try:
                answer = self._exchange(call, attempt)
            except ClientError as error:
                pause = call.failed(error, time.monotonic())
            else:
                pause = call.answered(answer, time.monotonic())
                if pause is None:
                    return answer
            time.sleep(pause)

    def _exchange(self, call: Call, attempt: Attempt) -> Answer:
        import urllib3
        from urllib3 import exceptions

        request = call.request
        try:
            response = self._connections().urlopen(
                request.method, self._service.base + request.path, body=request.body,
                headers={**self._header, **request.header, **attempt.header},
                timeout=urllib3.Timeout(connect=attempt.connect, read=attempt.read), pool_timeout=attempt.read, retries=False,
                redirect=False,
            )  # fmt: skip
        except (exceptions.ReadTimeoutError, exceptions.EmptyPoolError) as exc:
            raise call.overdue() from exc
        except (exceptions.ConnectTimeoutError, exceptions.NewConnectionError, exceptions.ProxyError) as exc:
            raise unreachable(self._service.url, exc) from exc
        except (exceptions.HTTPError, OSError) as exc:
            raise lost(self._service.url, exc) from exc
        return Answer(response.status, response.headers, response.data)

    def _connections(self) -> PoolManager:
        """Return this process's connections. A forked process must not use those of its parent."""
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
        options: dict[str, Any] = {"num_pools": 1, "maxsize": self._service.connections, "block": True}
        if self._service.ssl_context is not None:
            options["ssl_context"] = self._service.ssl_context
        return urllib3.PoolManager(**options) if proxy is None else urllib3.ProxyManager(proxy, **options)


class Task(AnyTask["Client"]):
    """A submitted input, whose result you fetch later. Any client of the same tenant can get the task with `task(id)`."""

    def status(self) -> State:
        """Return the state of the task. Raises NotFound if the task is unknown or its outcome has expired."""
        status, _ = read_outcome(self._client._send(poll(self.id, 0.0), self._client._service.timeout))
        return status

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result of the task. Raises TimedOut after `timeout` seconds (the task then continues), NotFound if the task is
        unknown or its outcome has expired, and another ApiError if the task failed."""
        polling = Polling(self.id, timeout, time.monotonic())
        while True:
            request, seconds = polling.next(time.monotonic())
            answer = self._client._send(request, seconds)
            result = polling.answered(answer, time.monotonic())
            if isinstance(result, Result):
                return result
            time.sleep(result)

    def cancel(self) -> None:
        """Cancel the task and delete its outcome. If it isn't on a GPU yet, it will not run. Unknown tasks are ignored."""
        with contextlib.suppress(NotFound):
            self._client._send(forget(self.id), self._client._service.timeout)


def _outcome(future: Future[Result]) -> Result | ClientError:
    try:
        return future.result()
    except ClientError as error:
        return error
