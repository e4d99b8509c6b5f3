"""Answers and health as a client reads them that knows the contract's members and no others."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tests.http.stand import Stand, on_stand, post


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    tokens_used: int | None
    latency_ms: float
    model_version: str


class _Inference(msgspec.Struct, forbid_unknown_fields=True):
    request_id: str
    output: str
    metadata: _Metadata


class _Plain(msgspec.Struct, forbid_unknown_fields=True):
    output: str
    request_id: str
    latency_ms: float


@on_stand()
async def test_a_client_that_knows_the_members_of_the_contract_and_no_others_reads_every_native_answer(
    stand: Stand,
) -> None:
    asked: list[tuple[str, dict[str, Any], Any]] = [
        ("/v1/inference", {"input": "a"}, _Inference),
        ("/api/inference", {"input": "a"}, _Plain),
        ("/v1/predict", {"model_id": "default", "input_data": "a"}, _Plain),
    ]
    for path, body, shape in asked:
        answer = await stand.ask(post(json.dumps(body), path))
        read = msgspec.json.decode(answer.body, type=shape, strict=True)
        assert read.output == "A"
        assert answer.header["date"].endswith("GMT"), "the time of an answer is in its head"
