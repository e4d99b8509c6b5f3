"""What is too large for a remote API over gRPC, and what it only has no room for now."""

from __future__ import annotations

import pytest

from headway.errors import RemoteError, RemoteRefused
from tests.backends.entries import batch
from tests.backends.test_grpc_remote import LONG, Api, Status, aborts


@pytest.mark.parametrize("trailers", [[], [("grpc-retry-pushback-ms", "-1")]])
async def test_a_lone_input_is_not_blamed_for_an_api_without_room(trailers: list[tuple[str, str]]) -> None:
    async with Api(aborts(Status.RESOURCE_EXHAUSTED, "no", *trailers)).against() as backend:
        with pytest.raises(RemoteError, match="gRPC RESOURCE_EXHAUSTED"):
            await backend.run(batch("wrong"), LONG)


@pytest.mark.parametrize(
    ("details", "trailers"),
    [
        ("SERVER: Received message larger than max (9 vs. 5)", []),
        ("grpc: received message larger than max (9 vs. 5)", []),
        ("gRPC message exceeds maximum size 5: 9", []),
        ("Received message exceeds the maximum configured message size.", []),
        ("Error decompressing: size limit, of 5 bytes, exceeded while decompressing message", []),
        (
            "the input is 9 characters long",
            [("x-headway-error", "PAYLOAD_TOO_LARGE"), ("grpc-retry-pushback-ms", "-1")],
        ),
    ],
)
async def test_a_message_that_is_too_large_for_the_api_blames_an_input(
    details: str, trailers: list[tuple[str, str]]
) -> None:
    async with Api(aborts(Status.RESOURCE_EXHAUSTED, details, *trailers)).against() as backend:
        for texts in (("a", "wrong"), ("wrong",)):
            with pytest.raises(RemoteRefused, match="failed at try 1"):
                await backend.run(batch(*texts), LONG)
