"""Nodes of a cluster that are asked, by the map that its nodes tell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis.exceptions import MovedError

from headway.brokers.redis import cluster
from headway.brokers.redis.cluster import Cluster
from headway.brokers.redis.link import Address
from headway.brokers.redis.server import Server

LAST = 16_383


class Nodes:
    """A cluster of which each node tells the same map.

    Attributes:
        told: rows of CLUSTER SLOTS.
        asked: addresses and commands, in order.
        moved: node to which the others send the calls on; None: each answers them itself.
    """

    def __init__(self, *owners: tuple[str | None, int]) -> None:
        self.told: list[list[Any]] = []
        self.asked: list[tuple[Address, str]] = []
        self.moved: Address | None = None
        self.own(*owners)

    def own(self, *owners: tuple[str | None, int]) -> None:
        """Let these nodes own equal parts of the slots."""
        ends = [LAST * (place + 1) // len(owners) for place in range(len(owners))]
        begins = [0, *(end + 1 for end in ends[:-1])]
        self.told = [
            [*span, [*owner, b"id"]] for span, owner in zip(zip(begins, ends, strict=True), owners, strict=True)
        ]

    def client(self, *seeds: Address) -> Cluster:
        return Cluster(seeds, lambda host, port: cast(Server, Node(self, (host, port))), 1.0)

    def those(self, command: str) -> list[Address]:
        """The nodes that were asked this since the last time."""
        found = [address for address, asked in self.asked if asked == command]
        self.asked.clear()
        return found


class Node:
    def __init__(self, nodes: Nodes, address: Address) -> None:
        self._nodes, self._address = nodes, address

    async def call(self, *command: Any, large: bool = False) -> Any:
        self._nodes.asked.append((self._address, command[0]))
        moved = self._nodes.moved
        if moved is not None and moved != self._address and command[0] != "CLUSTER SLOTS":
            raise MovedError(f"1 {moved[0]}:{moved[1]}")
        return self._nodes.told if command[0] == "CLUSTER SLOTS" else b"OK"

    ask = call

    async def leave(self, address: Address) -> None:
        self._nodes.asked.append((self._address, f"leave {address[0]}"))


@pytest.mark.parametrize(
    ("named", "host"), [("inside", "inside"), (b"inside", "inside"), (None, "seed"), ("", "seed"), ("?", "seed")]
)
async def test_a_node_is_asked_by_the_name_that_it_has_in_the_map(named: str | None, host: str, clock: object) -> None:
    nodes = Nodes((named, 7001))
    client = nodes.client(("seed", 7000))
    await client.call("key", "GET")
    assert nodes.those("GET") == [(host, 7001)]
    assert client.server_of("key") == f"{host}:7001"


async def test_what_goes_to_all_nodes_goes_to_those_that_there_are_now(clock: object) -> None:
    nodes = Nodes(("a", 1), ("b", 2))
    client = nodes.client(("a", 1))
    await client.everywhere("PING")
    assert nodes.those("PING") == [("a", 1), ("b", 2)]
    nodes.own(("a", 1), ("c", 3))
    await client.everywhere("PING")
    assert nodes.those("PING") == [("a", 1), ("c", 3)]


@pytest.mark.parametrize("left", [[], [("a", 1)], [("elsewhere", 9)]])
async def test_after_a_node_is_left_the_map_is_learnt_anew(left: Sequence[Address], clock: object) -> None:
    nodes = Nodes(("a", 1))
    client = nodes.client(("a", 1))
    await client.call("key", "GET")
    nodes.asked.clear()
    for address in left:
        await client.leave(address)
    assert nodes.those("leave a") == [address for address in left if address == ("a", 1)]
    await asyncio.sleep(cluster.REFRESH_EVERY)
    await client.call("key", "GET")
    await asyncio.sleep(0)
    assert len(nodes.those("CLUSTER SLOTS")) == len(left)


async def test_a_node_that_sends_a_call_on_is_known_to_have_been_left_just_now(clock: object) -> None:
    nodes = Nodes(("a", 1))
    client = nodes.client(("a", 1))
    await client.call("key", "GET")
    assert client.left_at < 0.0
    nodes.moved = ("b", 2)
    await client.call("key", "GET")
    assert client.left_at == asyncio.get_running_loop().time()
