"""Clients of a running service: `Client` for threads, `AsyncClient` for asyncio.

A call is one logical request. It is sent as often as needed, under one idempotency key, until it is answered or its time is
up. What to send, when to retry and what an answer means is decided without I/O, in one place for both clients.

    client         Client and Task
    async_client   AsyncClient and AsyncTask
    call           one call: attempts, pauses, time; and the polls for a task's outcome
    messages       requests and answers
    arrays         requests and answers with arrays
    service        address of the service, and what both clients share
    reaching       errors of connections
    errors         the tree of errors
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
