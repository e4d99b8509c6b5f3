import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack

import pytest

from headway.brokers.redis.connection import RedisConnection
from tests.dashboard.chromium import browser
from tests.dashboard.stage import TARGET, TOKEN, Stage
from tests.e2e.fleet import fleet
from tests.servers.redis import RedisServer


@pytest.fixture(scope="package")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("dashboard")
    with asyncio.Runner() as runner, ExitStack() as stack:
        held = AsyncExitStack()
        chromium = runner.run(held.enter_async_context(browser(folder)))
        stack.callback(lambda: runner.run(held.aclose()))
        redis = stack.enter_context(RedisServer("valkey", folder / "redis"))
        it = stack.enter_context(
            fleet(folder, redis, gateways=1, workers=2, controllers=1, target=TARGET, lawful=False, gateway_flags=())
        )
        it.expected |= {"batch failed", "worker process ended", "a browser could not sign in: wrong service token"}
        guarded = it.launch("controller", "--admin-token", TOKEN)
        guarded.ready()
        link = RedisConnection(redis.url, process="test")
        runner.run(link.open())
        try:
            yield Stage(runner, it, redis, guarded, chromium, link)
        finally:
            runner.run(link.close())
