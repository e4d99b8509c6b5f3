"""Real servers for tests: Redis and Valkey alone, under Sentinel, as a cluster and over TLS, and a failing network.

    with RedisServer("valkey", tmp_path, durable=True) as server:
        server.command("SET", "a", "1")
        server.kill()
        server.start()
        assert server.command("GET", "a") == b"1"

Every server is a child process on loopback, on ports chosen by the system, with its files in the test's folder. It ends
with its block, and with pytest however that ends.

Valkey and PostgreSQL come from wheels, Redis and PgBouncer from the distribution. Tests whose PgBouncer or
Redis (7.0 or newer) is missing are skipped; with HEADWAY_TEST_REQUIRE_SERVERS=1, as in CI, they fail. HEADWAY_TEST_REDIS_URL
(redis://USER:PASSWORD@HOST:PORT/DB) names a running server that the contract suites use instead of the distribution's.
Its database must be empty, as it is flushed between tests; its other databases aren't touched. Tests that stop or pause
a server always start their own.
"""
