"""Clients of a running service: `Client` for threads, `AsyncClient` for asyncio.

A call is one logical request. It is sent as often as needed, under one idempotency key, until it is answered or its time is
up. Code without I/O, which both clients share, decides what to send and when to retry, and reads the answers.
"""

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
