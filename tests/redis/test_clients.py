"""Addresses that a broker's URL stands for."""

from __future__ import annotations

from typing import Any

import pytest

from headway.brokers.redis.clients import connect


def place(pool: Any) -> tuple[str, int]:
    return pool.connection_kwargs["host"], pool.connection_kwargs["port"]


def test_a_sentinel_without_a_port_in_the_url_is_asked_at_26379() -> None:
    [client] = connect("redis+sentinel://10.0.0.1,10.0.0.2:7000/mymaster", 1.0, [1])
    sentinels: Any = vars(client)["_sentinels"]
    assert [place(one.connection_pool) for one in sentinels.sentinels] == [("10.0.0.1", 26379), ("10.0.0.2", 7000)]


@pytest.mark.parametrize(("url", "port"), [("redis://10.0.0.1", 6379), ("redis://10.0.0.1:7000/2", 7000)])
def test_a_server_without_a_port_in_the_url_is_asked_at_6379(url: str, port: int) -> None:
    [client] = connect(url, 1.0, [1])
    assert place(vars(client)["_server"]._redis.connection_pool) == ("10.0.0.1", port)
