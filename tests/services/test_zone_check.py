"""Warning of a gateway in a zone that no worker is in."""

from __future__ import annotations

from structlog.testing import capture_logs

from headway.gateway.workers_watcher import ALONE_FOR, ZoneCheck
from headway.model import WorkerInfo, WorkerStatus

WARNING = "no worker is in the zone of this gateway; workers of other zones answer"


def worker(zone: str, status: WorkerStatus = WorkerStatus.HEALTHY) -> WorkerInfo:
    return WorkerInfo(worker_id=f"in-{zone}", model="m", status=status, zone=zone)


def warned(zone: str, *workers: WorkerInfo, looks: int = 100) -> list[tuple[str, str]]:
    """Warnings, as their zones and hints, of looks that are one second apart."""
    now = 0.0
    check = ZoneCheck(zone, lambda: now)
    with capture_logs() as logs:
        for _ in range(looks):
            now += 1.0
            check.learn(workers)
    return [(one["zones"], one["hint"]) for one in logs if one["event"] == WARNING]


def test_a_zone_that_was_mistyped_is_warned_of_once_with_the_one_that_was_meant() -> None:
    assert warned("europe-west1", worker("europe-west-1"), worker("asia")) == [
        ("asia, europe-west-1", "Did you mean europe-west-1?")
    ]


def test_a_gateway_without_a_zone_among_workers_in_zones_is_warned_of() -> None:
    assert warned("", worker("a"), worker("b")) == [("a, b", "Set --zone to that of the workers nearby.")]


def test_a_zone_with_a_worker_that_starts_and_a_fleet_without_any_worker_are_not_warned_of() -> None:
    assert warned("a", worker("a", WorkerStatus.STARTING), worker("b")) == []
    assert warned("a") == []
    assert warned("", worker("")) == []
    assert warned("a", worker("b", WorkerStatus.OFFLINE)) == []


def test_a_zone_whose_workers_come_later_is_not_warned_of_and_one_that_loses_them_again_is_warned_of_again() -> None:
    now = 0.0
    check = ZoneCheck("a", lambda: now)
    with capture_logs() as logs:
        for zones in ([], ["b"], ["a", "b"], ["b"], ["a"], ["b"]):
            for _ in range(3):
                now += 0.9 * ALONE_FOR
                check.learn([worker(zone) for zone in zones])
    assert [one["event"] for one in logs] == [WARNING] * 3
    left = "Its workers have left. Start some there, unless the zone is given up."
    assert [one["hint"] for one in logs] == ["Set --zone to that of the workers nearby.", left, left]
    with capture_logs() as logs:
        check = ZoneCheck("a", lambda: now)
        check.learn([worker("b")])
        now += 0.9 * ALONE_FOR
        check.learn([worker("b"), worker("a")])
        now += 0.9 * ALONE_FOR
        check.learn([worker("b")])
    assert logs == []
