"""Default fixtures for tests without a decorator such as `on_stand`."""

import pytest

from headway.runtime.fair_turns import Begin, FairTurns
from tests.http.stand import served
from tests.http.test_admin import played
from tests.scenes import Played


@pytest.fixture
def stand() -> Played:
    return Played(served)


@pytest.fixture
def port() -> Played:
    return Played(played)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[FairTurns, str]]:
    """Record each wait for a turn: the line and the tenant."""
    asked, wait = list[tuple[FairTurns, str]](), FairTurns.wait

    def note(line: FairTurns, tenant: str, begin: Begin) -> None:
        asked.append((line, tenant))
        wait(line, tenant, begin)

    monkeypatch.setattr(FairTurns, "wait", note)
    return asked
