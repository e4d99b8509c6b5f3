"""The input policy of a running process, with a real function, for every API."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

from tests.e2e.server import TIERS, serving
from tests.promises import ways_in
from tests.promises.calls import Stream, answered, channel
from tests.promises.ways_in import Told, WayIn
from tests.servers.ports import Port

RULES = """
[[rules]]
name = "forms"
normalise = "NFKC"
[[rules]]
name = "unseen"
characters = ["zero-width", "bidi", "tags"]
[[rules]]
name = "words"
patterns = ['(?i)forbidden']
"""
JUDGE = """
[[rules]]
name = "judge"
function = "tests.targets.guard:check"
deadline_ms = 10000
"""
"""Has the longest possible deadline, so that it doesn't time out on a busy machine."""
HIDDEN = "\uff26OR\u200bbidden"


def policy(folder: Path, text: str) -> str:
    path = folder / "policy.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def spellings(way: WayIn, body: bytes) -> list[bytes]:
    """Encode a body as JSON with every character escaped, only non-ASCII characters escaped, and nothing escaped."""
    if way in (ways_in.OCTET_STREAM, ways_in.OIP_BINARY):
        return [body]
    plain = json.dumps(json.loads(body), ensure_ascii=False).encode()
    return [body, plain, body.replace(b"bidden", b"\\u0062idde\\u006e")]


async def call(way: WayIn, port: int, texts: list[str]) -> Told:
    """Call a gRPC method."""
    sent, made = way.write(texts), channel(port)
    try:
        if way.wire == "stream":
            stream = Stream(made.stream_stream(sent.path)())
            found = await stream.ask(sent, texts[0])
            await stream.close()
            return found.told
        return (await answered(way, made.unary_unary(sent.path)(sent.body))).told
    finally:
        await made.close()


def test_every_way_in_is_screened_and_a_function_judges_what_the_other_rules_let_in(tmp_path: Path) -> None:
    flags = *TIERS, "--input-policy", policy(tmp_path, RULES + JUDGE), "--cache"
    with (
        contextlib.closing(Port()) as port,
        serving(tmp_path, *flags, "--grpc-port", str(port.number), lawful=False, target="tests.targets.kinds:plain") as server,
    ):  # fmt: skip
        count = 0
        for way in ways_in.WAYS_IN:
            texts = [*["good"] * min(way.most - 1, 3), f"user {HIDDEN}"]
            if way.wire == "http":
                sent = way.write(texts)
                for body in spellings(way, sent.body):
                    answer = server.post(sent.path, body, *sent.fields)
                    told = way.read(answer.status, dict(answer.header), answer.body)
                    assert (answer.status, told.code) == (422, "REJECTED_BY_POLICY"), (way.name, body, answer.body)
                    count += 1
            else:
                told = asyncio.run(call(way, port.number, texts))
                assert told == Told([], "REJECTED_BY_POLICY"), way.name
                count += 1
        assert server.metrics().value("input_policy_total", rule="words", effect="refused") == count
        assert server.ask("a bad one").refusal() == "REJECTED_BY_POLICY"
        server.ask("good").output()
        assert server.metrics().value("input_policy_total", rule="judge", effect="refused") == 1
