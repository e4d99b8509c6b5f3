"""Clients of a running service, for programs: `Client` for threads, `AsyncClient` for asyncio.

A call is one logical request: it is sent as often as needed, under one idempotency key, until it has an answer or its
time is over. What to send, when to send it again and what an answer means is decided in one place without I/O, for both
clients alike.

    client         Client and Task
    async_client   AsyncClient and AsyncTask
    call           one call: attempts, pauses, time
    polling        the long polls for a task's outcome
    messages       requests and answers
    arrays         those of arrays
    service        where the service is, and how it is reached
    reaching       errors of a service that is not reached
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
    "Client",
    "AsyncClient",
    "Result",
    "Task",
    "AsyncTask",
    "ClientError",
    "InvalidArgument",
    "InvalidInput",
    "Unreachable",
    "TimedOut",
    "ApiError",
    "BadRequest",
    "Unauthenticated",
    "Forbidden",
    "NotFound",
    "Conflict",
    "PayloadTooLarge",
    "RejectedByModel",
    "RejectedByPolicy",
    "RateLimited",
    "Overloaded",
    "ModelFailed",
    "DeadlineExceeded",
]
