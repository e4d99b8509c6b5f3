"""Calls of the API server, each on a connection of its own: they are few, and token and authorities change.

| the API server says | what it means | what is raised |
|---|---|---|
| nothing in time, no connection, a name that it has no certificate for | it cannot be asked now | ScalingUnavailable |
| 429, 5xx | it has no time; no call before Retry-After has passed | ScalingUnavailable |
| 401 | it does not know the token | ScalingRefused |
| 403 | the Role lacks a rule, or an admission rule objects | ScalingRefused, with the rule |
| 404, 409 | there is no such object; somebody has changed it since | nothing: the status |
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec

from headway import __version__
from headway.errors import ScalingRefused, ScalingUnavailable
from headway.runtime.sockets import Sockets
from headway.scaling.kubernetes.account import ServiceAccount
from headway.scaling.kubernetes.objects import ResourcePath, Status

TIMEOUT = 10.0
"""Seconds for one call."""
LONGEST_REST = 60.0
"""Most seconds without a call that the API server is granted."""
MAX_BYTES = 8 << 20
"""Largest answer. A page of a list has at most 500 objects."""
MERGE_PATCH = "application/merge-patch+json"
NOT_FOUND, CONFLICT = 404, 409

T = TypeVar("T")


class ApiAnswer(NamedTuple):
    """Status of an answer: success, NOT_FOUND or CONFLICT; and its body."""

    status: int
    body: bytes


class KubernetesApi:
    """API server, asked as the service account of this pod.

    Arguments:
        url: its URL, https.
        account: service account.
        clock: monotonic seconds.
        timeout: seconds for one call.
    """

    def __init__(self, url: str, account: ServiceAccount, clock: Callable[[], float], timeout: float = TIMEOUT) -> None:
        self._url, self._account, self._clock, self._timeout = url, account, clock, timeout
        self._rests_until = -math.inf

    @property
    def namespace(self) -> str:
        """Namespace of this pod."""
        return self._account.namespace

    async def get(
        self, place: ResourcePath, kind: type[T], verb: str = "get", query: Mapping[str, str] | None = None
    ) -> T | None:
        """Object at a place; None: there is none.

        Raises:
            ScalingRefused, ScalingUnavailable: see the table above.
        """
        answer = await self._call("GET", place, verb, query or {})
        if answer.status == NOT_FOUND:
            return None
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except msgspec.MsgspecError as exc:
            raise ScalingUnavailable(f"the API server answers no {kind.__name__} for {place}: {exc}") from None

    async def patch(self, place: ResourcePath, change: Mapping[str, Any]) -> int:
        """Merge a change into the object at a place: 200, NOT_FOUND or CONFLICT.

        Raises:
            ScalingRefused, ScalingUnavailable: see the table above.
        """
        return (await self._call("PATCH", place, "patch", {}, msgspec.json.encode(change))).status

    async def _call(
        self, method: str, place: ResourcePath, verb: str, query: Mapping[str, str], body: bytes | None = None
    ) -> ApiAnswer:
        if (rest := self._rests_until - self._clock()) > 0:
            raise ScalingUnavailable(f"the API server asked not to be called for another {math.ceil(rest)} s")
        answer, headers = await self._asked(method, place, query, body)
        if 200 <= answer.status < 300 or answer.status in (NOT_FOUND, CONFLICT):
            return answer
        said = _said(answer)
        if answer.status == 401:
            hint = "If the service account was deleted, make it again and restart the pod."
            raise ScalingRefused(
                f"the API server does not know the token of this pod's service account: {said}. {hint}"
            )
        if answer.status == 403:
            raise _forbidden(place, verb, said)
        if answer.status == 429 or answer.status >= 500:
            asked = headers.get("Retry-After", "")
            if asked.isascii() and asked.isdigit():
                self._rests_until = self._clock() + min(float(asked[:9]), LONGEST_REST)
            raise ScalingUnavailable(f"the API server does not {verb} {place} now: {said}")
        raise ScalingRefused(f"the API server does not {verb} {place}: {said}. Correct what it objects to.")

    async def _asked(
        self, method: str, place: ResourcePath, query: Mapping[str, str], body: bytes | None
    ) -> tuple[ApiAnswer, Mapping[str, str]]:
        headers = {
            "Accept": "application/json",
            "Authorization": f"Bearer {self._account.token}",
            "User-Agent": f"headway/{__version__}",
            **({} if body is None else {"Content-Type": MERGE_PATCH}),
        }
        sockets = Sockets()
        connector = aiohttp.TCPConnector(ssl=self._account.trust, socket_factory=sockets.create)
        try:
            async with (
                asyncio.timeout(self._timeout),
                aiohttp.ClientSession(
                    connector=connector,
                    cookie_jar=aiohttp.DummyCookieJar(),
                    headers=headers,
                    timeout=aiohttp.ClientTimeout(total=None),
                ) as session,
                session.request(
                    method, self._url + place.path, params=query, data=body, allow_redirects=False
                ) as response,
            ):
                return ApiAnswer(response.status, await _bounded(response.content)), response.headers
        except TimeoutError:
            raise ScalingUnavailable(
                f"the API server at {self._url} did not answer within {self._timeout:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as exc:
            raise ScalingUnavailable(
                f"the API server at {self._url} cannot be asked: {type(exc).__name__}: {exc}"
            ) from None
        finally:
            await asyncio.shield(sockets.end())


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    got = bytearray()
    while piece := await content.read(MAX_BYTES + 1 - len(got)):
        got += piece
        if len(got) > MAX_BYTES:
            raise ScalingUnavailable(f"the API server answered more than {MAX_BYTES} bytes")
    return bytes(got)


def _forbidden(place: ResourcePath, verb: str, said: str) -> ScalingRefused:
    verbs = ("get", "patch") if place.part else (verb,)
    hint = (
        f"The Role of this pod's service account needs the rule {place.rule(*verbs)}, unless an admission rule objects."
    )
    return ScalingRefused(f"the API server forbids to {verb} {place}: {said}. {hint}")


def _said(answer: ApiAnswer) -> str:
    try:
        message = msgspec.json.decode(answer.body, type=Status).message
    except msgspec.MsgspecError:
        message = ""
    return f"HTTP {answer.status}: {message.rstrip('.')}" if message else f"HTTP {answer.status}"
