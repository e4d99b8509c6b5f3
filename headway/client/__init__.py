"""Clients of a running service: `Client` for threads, `AsyncClient` for asyncio.

A call repeats its request, always with the same idempotency key, until it gets an answer, or runs out of retries or time.
The code that both clients share does no I/O. It decides what to send and when to retry, and reads the answers."""

from __future__ import annotations

from headway.client.async_client import AsyncClient, AsyncTask
from headway.client.client import Client, Task
from headway.client.errors import (
    ApiError,
    BadRequest,
    ClientError,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidArgument,
    InvalidInput,
    ModelFailed,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    RateLimited,
    RejectedByModel,
    RejectedByPolicy,
    TimedOut,
    Unauthenticated,
    Unreachable,
)
from headway.client.messages import Result

__all__ = [
    "Client", "AsyncClient", "Result", "Task", "AsyncTask", "ClientError", "InvalidArgument", "InvalidInput", "Unreachable",
    "TimedOut", "ApiError", "BadRequest", "Unauthenticated", "Forbidden", "NotFound", "Conflict", "PayloadTooLarge",
    "RejectedByModel", "RejectedByPolicy", "RateLimited", "Overloaded", "ModelFailed", "DeadlineExceeded",
]  # fmt: skip
