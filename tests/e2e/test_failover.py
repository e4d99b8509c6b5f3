"""`headway failover` under load: no accepted request is lost, and none is run twice, whichever way the servers are set up."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.client import wait_until
from tests.e2e.fleet import AWAY, HARDY, PATIENT, Fleet, fleet
from tests.e2e.server import run_cli
from tests.e2e.test_fleet_restarts import load
from tests.servers.cluster import ClusterSetup
from tests.servers.redis import KINDS
from tests.servers.sentinel import SentinelSetup

pytestmark = pytest.mark.parametrize("kind", KINDS)

SLOW = "tests.targets.journal:Slow"


def hand_over(it: Fleet, folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    done = run_cli(it.gateways[0], folder, "failover", "--broker", url)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done


def check(it: Fleet) -> None:
    """No input has run twice. That each request had its answer is seen to by `load`."""
    ran = Counter(text for run in it.journal() for text in run.inputs if text.startswith("request"))
    assert not {text: times for text, times in ran.items() if times > 1}


def test_a_planned_failover_under_sentinels_loses_no_accepted_request(tmp_path: Path, kind: str) -> None:
    with (
        SentinelSetup(kind, tmp_path / "sentinel") as setup,
        fleet(tmp_path, setup.primary, gateways=2, url=setup.url, target=SLOW) as it,
    ):
        it.expected |= AWAY
        second = setup.replica
        with load(list(it.gateways)) as clients:
            clients.answered(20)
            done = hand_over(it, tmp_path, setup.url)
            clients.answered(20)
        assert "takes no writes" in done.stdout
        assert setup.primary is second
        it.redis = second
        check(it)


def test_a_planned_failover_of_a_cluster_loses_no_accepted_request(tmp_path: Path, kind: str) -> None:
    flags = ("--shards", "4")
    with ClusterSetup(kind, tmp_path / "cluster", replicas=True) as setup:
        wait_until(lambda: all("slave0" in one.command("INFO", "replication") for one in setup.servers))
        home = setup.servers.index(setup.of("headway:{fleet}:k"))
        with fleet(
            tmp_path, setup.servers[home], gateways=2, url=setup.url, target=SLOW,
            lawful=False,  # Processes keep connections to the former primaries, too: more than at their start.
            gateway_flags=(*PATIENT, *flags), worker_flags=(*HARDY, *flags),
        ) as it:  # fmt: skip
            it.expected |= AWAY
            with load(list(it.gateways)) as clients:
                clients.answered(20)
                done = hand_over(it, tmp_path, setup.url)
                clients.answered(20)
            assert done.stdout.count("is the primary in the place of") == 3
            assert [one.command("ROLE")[0] for one in setup.replicas] == [b"master"] * 3
            it.redis = setup.replicas[home]
            check(it)
