"""Bodies that come byte by byte, or stop half-way, at the doors that read whole bodies: their time-out counts from the head on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

import pytest

from headway.http.inference.fast_path import FastPathConnection
from headway.http.server import connection
from headway.oip.tensors import pack
from tests.http.stand import INSTANT, Answer, Stand, post, served, settled
from tests.http.test_oip import LENGTH, PATH, infer

KEY = "Authorization: Bearer k"
KEYS = {"k": {"rate": 60.0, "burst": 5.0}}


def _binary() -> bytes:
    octets = pack([b"abc", b"defg"])
    given = {"name": "IN", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(octets)}}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    return post(head + octets, PATH, f"{LENGTH}: {len(head)}", KEY)


def _packed() -> bytes:
    _, _, body = infer(["abc"]).partition(b"\r\n\r\n")
    return post(gzip.compress(body), PATH, "Content-Encoding: gzip", KEY)


def _chunked() -> bytes:
    head, _, body = infer(["abc"], KEY).partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    fields = b"\r\n".join([*lines, b"Transfer-Encoding: chunked"])
    return fields + b"\r\n\r\n" + b"".join(b"1\r\n%c\r\n" % octet for octet in body) + b"0\r\n\r\n"


def _of_oip(answer: Answer) -> str:
    [(name, told)] = answer.json.items()
    assert name == "error"
    return str(told)


def _of_openai(answer: Answer) -> str:
    return str(answer.json["error"]["message"])


DOORS: dict[str, tuple[bytes, Callable[[Answer], str]]] = {
    "JSON": (infer(["abc"], KEY), _of_oip),
    "binary": (_binary(), _of_oip),
    "gzip": (_packed(), _of_oip),
    "chunked": (_chunked(), _of_oip),
    "completions": (post('{"prompt": "abc"}', "/v1/completions", KEY), _of_openai),
    "embeddings": (post('{"input": "abc"}', "/v1/embeddings", KEY), _of_openai),
}


@pytest.mark.parametrize("stops", [False, True], ids=["trickles", "stops"])
@pytest.mark.parametrize("door", DOORS)
def test_a_body_that_is_not_whole_in_time_is_given_up_however_it_comes(
    door: str, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, told = DOORS[door]
    begin = whole.index(b"\r\n\r\n") + 5
    heard = [0]
    receive = FastPathConnection.data_received

    def counted(connected: FastPathConnection, data: bytes) -> None:
        receive(connected, data)
        heard[0] += len(data)

    monkeypatch.setattr(FastPathConnection, "data_received", counted)

    async def main(stand: Stand) -> None:
        with pytest.MonkeyPatch.context() as patch:
            await ask(stand, patch)

    async def ask(stand: Stand, patch: pytest.MonkeyPatch) -> None:
        now, limit = [INSTANT], stand.settings.read_timeout_ms / 1000
        patch.setattr(connection, "monotonic", lambda: now[0])
        client = await stand.connect()
        await client.send(whole[:begin])
        await settled(lambda: heard[0] == begin)
        for octet in whole[begin : begin + 1 if stops else -1]:
            now[0] = min(now[0] + 0.5, INSTANT + limit - 1.0)
            before = heard[0]
            await client.send(bytes([octet]))
            await settled(lambda: heard[0] > before)  # noqa: B023 - awaited at once
            stand.door.sweep(now[0])
        (connected,) = stand.door._connections()
        assert not connected.transport.is_closing()
        stand.later(limit + 1.0)
        answer = await client.answer()
        assert answer.status == 408
        assert "read_timeout_ms" in told(answer)
        assert await client.ended()
        assert stand.gateway.asked == []
        assert connected.reserved == 0

    served(main, KEYS)
