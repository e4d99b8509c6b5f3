"""What tests of these ports are played on, where no decorator asks for another."""

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
    """An admin port, with the stand behind it."""
    return Played(played)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[tuple[FairTurns, str]]:
    """Lines in which turns are waited for, and the tenants who wait."""
    asked, wait = list[tuple[FairTurns, str]](), FairTurns.wait

    def note(line: FairTurns, tenant: str, begin: Begin) -> None:
        asked.append((line, tenant))
        wait(line, tenant, begin)

    monkeypatch.setattr(FairTurns, "wait", note)
    return asked
