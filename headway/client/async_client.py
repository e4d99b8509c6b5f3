"""Client for asyncio, and the tasks it submits."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from headway.client.arrays import inference_of, several
from headway.client.client import CONCURRENCY
from headway.client.errors import ClientError, NotFound, lost, unreachable
from headway.client.messages import Answer, Request, Result, State, forget, poll, read_outcome, read_task, task
from headway.client.service import AnyClient, AnyTask, Attempt, Call, Polling

if TYPE_CHECKING:
    from aiohttp import ClientSession


class AsyncClient(AnyClient):
    """Client of a Headway service for asyncio, with the same arguments and methods as `Client`. Use it in a single event loop.

    async with headway.AsyncClient("http://127.0.0.1:8000") as client:
        print((await client.infer("hello")).output)
    """

    def _begin(self) -> None:
        self._session: ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._proxy = self._service.proxy

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Later calls raise RuntimeError."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def infer(
        self, input: Any, model: str | None = None, parameters: Mapping[str, Any] | None = None, timeout: float | None = None, *,
        idempotency_key: str | None = None, outputs: Sequence[str] | None = None,
    ) -> Result:  # fmt: skip
        """Run the model on one input; see `Client.infer`."""
        request, read = inference_of(input, model, parameters, self._service.key(idempotency_key), outputs)
        return read(await self._send(request, self._service.seconds(timeout)))

    @overload
    async def infer_many(
        self, inputs: Iterable[Any], model: str | None = None, parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None, *, concurrency: int = CONCURRENCY, return_errors: Literal[False] = False,
        outputs: Sequence[str] | None = None,
    ) -> list[Result]: ...  # fmt: skip

    @overload
    async def infer_many(
        self, inputs: Iterable[Any], model: str | None = None, parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None, *, concurrency: int = CONCURRENCY, return_errors: Literal[True],
        outputs: Sequence[str] | None = None,
    ) -> list[Result | ClientError]: ...  # fmt: skip

    async def infer_many(
        self, inputs: Iterable[Any], model: str | None = None, parameters: Mapping[str, Any] | None = None,
        timeout: float | None = None, *, concurrency: int = CONCURRENCY, return_errors: bool = False,
        outputs: Sequence[str] | None = None,
    ) -> list[Result] | list[Result | ClientError]:  # fmt: skip
        """Run the model on several inputs; see `Client.infer_many`. Unless `return_errors` is True, an error cancels the other requests."""
        if concurrency < 1:
            raise ValueError(f"concurrency = {concurrency}: must be at least 1")
        seconds = self._service.seconds(timeout)
        split, result_of = several(inputs)
        waiting = enumerate(split)
        outcomes: dict[int, Result | ClientError] = {}

        async def ask(input: Any) -> Result:
            request, read = inference_of(input, model, parameters, self._service.key(None), outputs)
            return result_of(read(await self._run(self._service.call(request, seconds, patient=True))))

        async def work() -> None:
            for index, input in waiting:
                try:
                    outcomes[index] = await ask(input)
                except ClientError as error:
                    error.locate(index, split)
                    outcomes[index] = error
                    if not return_errors:
                        raise

        workers = [asyncio.ensure_future(work()) for _ in range(min(concurrency, self._service.connections))]
        try:
            await asyncio.gather(*workers)
        except ClientError:
            pass
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        answers = [outcomes[index] for index in sorted(outcomes)]
        if return_errors:
            return answers
        results = []
        for answer in answers:
            if isinstance(answer, ClientError):
                raise answer
            results.append(answer)
        return results

    async def submit(
        self, input: Any, model: str | None = None, parameters: Mapping[str, Any] | None = None, timeout: float | None = None, *,
        idempotency_key: str | None = None,
    ) -> AsyncTask:  # fmt: skip
        """Submit an input as a task; see `Client.submit`."""
        request = task(input, model, parameters, self._service.key(idempotency_key), timeout)
        return AsyncTask(self, read_task(await self._send(request, self._service.timeout)))

    def task(self, id: str) -> AsyncTask:
        """Return the task with this id, which another process may have submitted. No request is sent."""
        return AsyncTask(self, id)

    async def _send(self, request: Request, timeout: float) -> Answer:
        return await self._run(self._service.call(request, timeout))

    async def _run(self, call: Call) -> Answer:
        while True:
            attempt = call.attempt(time.monotonic())
            pause: float | None
            try:
                answer = await self._exchange(call, attempt)
            except ClientError as error:
                pause = call.failed(error, time.monotonic())
            else:
                pause = call.answered(answer, time.monotonic())
                if pause is None:
                    return answer
            await asyncio.sleep(pause)

    async def _exchange(self, call: Call, attempt: Attempt) -> Answer:
        import aiohttp
        import yarl

        request, service = call.request, self._service
        try:
            async with self._open().request(
                request.method,
                yarl.URL(service.base + request.path, encoded=True),
                data=request.body,
                headers={**service.header, **request.header, **attempt.header},
                timeout=aiohttp.ClientTimeout(total=attempt.read, sock_connect=attempt.connect),
                proxy=self._proxy,
                allow_redirects=False,
            ) as response:
                return Answer(response.status, response.headers, await response.read())
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            raise unreachable(service.url, exc) from exc
        except TimeoutError as exc:
            raise call.overdue() from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise lost(service.url, exc) from exc

    def _open(self) -> ClientSession:
        import aiohttp

        if self._closed:
            raise RuntimeError("the client is closed")
        loop = asyncio.get_running_loop()
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._service.connections, ssl=self._service.ssl_context or True)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
            self._loop = loop
        if self._loop is not loop:
            raise RuntimeError("the client belongs to another event loop; make a client for each loop")
        return self._session


class AsyncTask(AnyTask["AsyncClient"]):
    """A submitted input, whose result you fetch later. Any client of the same tenant can get the task with `task(id)`."""

    async def status(self) -> State:
        """Return the state of the task; see `Task.status`."""
        status, _ = read_outcome(await self._client._send(poll(self.id, 0.0), self._client._service.timeout))
        return status

    async def result(self, timeout: float | None = None) -> Result:
        """Wait for the result of the task; see `Task.result`."""
        polling = Polling(self.id, timeout, time.monotonic())
        while True:
            request, seconds = polling.next(time.monotonic())
            answer = await self._client._send(request, seconds)
            result = polling.answered(answer, time.monotonic())
            if isinstance(result, Result):
                return result
            await asyncio.sleep(result)

    async def cancel(self) -> None:
        """Cancel the task and delete its outcome; see `Task.cancel`."""
        with contextlib.suppress(NotFound):
            await self._client._send(forget(self.id), self._client._service.timeout)
