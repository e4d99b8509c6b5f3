import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import dialects
from headway.config import FIELDS, Settings, flag, idle, is_loopback, kind, load, misspelt
from headway.config.urls import shown_url
from headway.errors import SettingError

GOOD: dict[str, tuple[str, Any]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("8080", 8080),
    "max_wait_ms": ("12.5", 12.5),
    "log_json": ("yes", True),
    "reload": ("Off", False),
    "policy": ("window", "window"),
    "admin_token": ("s3cret", "s3cret"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_setting_means_the_same_wherever_it_is_written(name: str, tmp_path: Path) -> None:
    text, value = GOOD[name]
    file = tmp_path / "some.toml"
    file.write_text(f"{name} = {str(value).lower() if kind(name) is bool else repr(value)}\n")
    for settings in (
        load({name: text}, {}),
        load({name: value}, {}),
        load({}, {f"HEADWAY_{name.upper()}": text}),
        load({}, {}, file),
    ):
        assert getattr(settings, name) == value


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text("port = 1\nadmin_port = 1001\nworkers = 3\n")
    settings = load({"port": "3"}, {"HEADWAY_PORT": "2", "HEADWAY_ADMIN_PORT": "1002"}, file)
    assert (settings.port, settings.admin_port, settings.workers, settings.max_batch_size) == (3, 1002, 3, 32)


def test_settings_are_read_from_the_environment_and_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load({}, {"HEADWAY_PORT": "", "HEADWAY_HOST": "", "HEADWAY_MAX_WAIT_MS": ""}) == Settings(), "empty: not set"
    Path("some.toml").write_text("workers = 2\n")
    assert load({}, {"HEADWAY_CONFIG": "some.toml"}).workers == 2
    Path("headway.toml").write_text("port = 8123\n")
    assert load({}, {}).port == 8123
    monkeypatch.setitem(os.environ, "HEADWAY_PORT", "8765")
    assert load({}).port == 8765


TO_ZERO = {"min_workers": 0, "scale_to_zero_after_s": 60}
BAD_FLAGS: list[tuple[dict[str, Any], str, str]] = [
    ({"max_batch_size": "4097"}, "--max-batch-size = 4097:", "between 1 and 4096 inputs"),
    ({"max_batch_size": "4.5"}, "--max-batch-size = '4.5':", "is not a whole number"),
    ({"queue_timeout_ms": "2s"}, "--queue-timeout-ms = '2s':", "the unit is ms"),
    ({"gpu_timeout_ms": "nan"}, "--gpu-timeout-ms = nan:", "between 1 and 600000 ms"),
    ({"gpu_timeout_ms": "1e999"}, "--gpu-timeout-ms = inf:", "between 1 and 600000 ms"),
    ({"request_timeout_ms": "600001"}, "--request-timeout-ms = 600001.0:", "between 1 and 600000 ms"),
    ({"reserved_share": "0.6"}, "--reserved-share = 0.6:", "between 0 and 0.5"),
    ({"policy": "pacde"}, "--policy = 'pacde':", "Did you mean paced?"),
    ({"weight": "a token"}, "--weight = 'a token':", "for example tokens"),
    ({"log_level": "loud"}, "--log-level = 'loud':", "Use debug or info or warning or error."),
    ({"model": "a b"}, "--model = 'a b':", "letters, digits"),
    ({"model": ""}, "--model = '':", "1 to 128"),
    ({"host": "my host"}, "--host = 'my host':", "For example 127.0.0.1"),
    ({"tiers": "a,,b"}, "--tiers = 'a,,b':", "different names"),
    ({"tiers": "a,a"}, "--tiers = 'a,a':", "different names"),
    ({"tiers": "gold,silver"}, "--default-tier (its default) = 'paid':", "tiers gold,silver of --tiers"),
    ({"default_tier": "fre"}, "--default-tier = 'fre':", "Use free."),
    ({"devices": "0,1", "workers": "3"}, "--devices = '0,1':", "2 devices for 3 workers (--workers)"),
    ({"devices": "first"}, "--devices = 'first':", "'first' is not the id of a GPU"),
    ({"devices": "cuda:0"}, "--devices = 'cuda:0':", "'cuda:0' is not the id of a GPU"),
    ({"devices": "-1"}, "--devices = '-1':", "nvidia-smi -L"),
    ({"devices": "GPU-"}, "--devices = 'GPU-':", "is not the id of a GPU"),
    ({"devices": "0,", "workers": "2"}, "--devices = '0,':", "empty id"),
    ({"queue_timeout_ms": "5000"}, "--queue-timeout-ms = 5000.0:", "longer than --request-timeout-ms (4000 ms)"),
    ({"max_wait_ms": "2500"}, "--max-wait-ms = 2500.0:", "longer than --queue-timeout-ms (2000 ms)"),
    ({"policy": "table", "max_wait_ms": "10"}, "--max-wait-ms = 10.0:", "no effect with --policy table"),
    ({"admin_host": "0.0.0.0"}, "--admin-host = '0.0.0.0':", "HEADWAY_ADMIN_TOKEN"),
    ({"admin_port": "8000"}, "--admin-port = 8000:", "also the public port (--port)"),
    ({"grpc_port": "8000"}, "--grpc-port = 8000:", "also the HTTP port (--port)"),
    ({"grpc_port": "9000"}, "--grpc-port = 9000:", "also the admin port (--admin-port)"),
    ({"tier_rates": "free=1,paid=2, free=2"}, "--tier-rates = 'free=1,paid=2, free=2':", "the tier 'free' twice"),
    ({"keys": "ledger"}, "--keys = 'ledger':", "--ledger"),
    ({"admin_token": "a,b,c"}, "--admin-token = '…':", "two with a comma"),
    ({"admin_token": "a,"}, "--admin-token = '…':", "NEW,OLD"),
    ({"admin_token": "hw_live_x"}, "--admin-token = '…':", "client's key"),
    ({"log_json": "perhaps"}, "--log-json = 'perhaps':", "must be true or false"),
    ({"autoscale": "kubernetes"}, "--autoscale = 'kubernetes':", "is not known"),
    ({"scale_policy": "plans"}, "--scale-policy = 'plans':", "Did you mean plan?"),
    ({"min_workers": 3, "max_workers": 2}, "--min-workers = 3:", "is more than --max-workers (2)"),
    ({"min_workers": -1}, "--min-workers = -1:", "between 0"),
    ({"scale_to_zero_after_s": 60}, "--scale-to-zero-after-s = 60", "needs --min-workers 0, but it is 1"),
    ({**TO_ZERO, "models_per_gpu": 2}, "--scale-to-zero-after-s = 60", "already make room for others"),
    ({"autoscale": "local", "models_per_gpu": 2}, "--autoscale = 'local':", "--models-per-gpu"),
    ({"scale_rules": "[]"}, "--scale-rules = ", "0 rules"),
    ({"scale_rules": '[{"queue_above": 1}]'}, "--scale-rules = ", "For example"),
    ({"remote_format": "xml"}, "--remote-format = 'xml':", f"Use auto or {' or '.join(dialects.NAMES)}."),
]


@pytest.mark.parametrize(("flags", "beginning", "part"), BAD_FLAGS, ids=lambda value: str(value)[:40])
def test_a_bad_flag_is_named_with_value_reason_and_mend(flags: dict[str, Any], beginning: str, part: str) -> None:
    with pytest.raises(SettingError) as caught:
        load(flags, {})
    assert str(caught.value).startswith(beginning)
    assert part in str(caught.value)
    assert caught.value.reason
    assert caught.value.hint.endswith(".")


def test_the_environment_is_named_as_it_was_written() -> None:
    with pytest.raises(SettingError, match=r"^HEADWAY_MAX_BATCH_SIZE = 0: must lie between"):
        load({}, {"HEADWAY_MAX_BATCH_SIZE": "0"})
    with pytest.raises(SettingError, match=r"^HEADWAY_QUEUE_TIMEOUT_MS = .* than --request-timeout-ms"):
        load({"request_timeout_ms": "1000"}, {"HEADWAY_QUEUE_TIMEOUT_MS": "1500"})
    with pytest.raises(SettingError, match=r"enableServiceLinks"):
        load({}, {"HEADWAY_PORT": "tcp://10.0.0.1:80"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HEADWAY_MAX_BATCHSIZE", ["HEADWAY_MAX_BATCH_SIZE"]),
        ("HEADWAY_MAXBATCH_SIZE", ["HEADWAY_MAX_BATCH_SIZE"]),
        ("HEADWAY_CONFG", ["HEADWAY_CONFIG"]),
        ("HEADWAY_ADMIN_TOKN", ["HEADWAY_ADMIN_TOKEN"]),
        ("HEADWAY_MAX_BATCH_SIZE", []),
        ("HEADWAY_ELSEWHERE", []),
        ("HEADWAY_SERVICE_HOST", []),
        ("HEADWAY_SERVICE_PORT", []),
        ("HEADWAY_SERVICE_PORT_HTTP", []),
        ("HEADWAY_PORT_8000_TCP", []),
        ("HEADWAY_PORT_8000_TCP_ADDR", []),
        ("HEADWAY_PORT_8000_TCP_PORT", []),
        ("HEADWAY_PORT_8000_TCP_PROTO", []),
        ("HEADWAY_TEST_REQUIRE_SERVERS", []),
        ("MAX_BATCHSIZE", []),
        ("HEADWAY_PROT", ["HEADWAY_PORT"]),
        ("HEADWAY_HSOT", ["HEADWAY_HOST"]),
    ],
)
def test_a_variable_much_like_a_setting_is_told_from_what_others_set(name: str, meant: list[str]) -> None:
    assert misspelt({name: "1"}, ["HEADWAY_ELSEWHERE"]) == [(name, one) for one in meant]
    assert misspelt({name: ""}, []) == []


BAD_FILES: list[tuple[str, str]] = [
    ("max_batch_size = 0", r"some\.toml: max_batch_size = 0: must lie between"),
    ('port = "80"', r"some\.toml: port = '80': must be a whole number"),
    ("port = true", r"some\.toml: port = True: must be a whole number"),
    ("model_version = 2", r"some\.toml: model_version = 2: must be a string\. Put it in quotes"),
    ("max_wait_ms = [1]", r"some\.toml: max_wait_ms = \[1\]: must be a number"),
    ("max_batchsize = 4", r"some\.toml: max_batchsize = 4: there is no such setting\. Did you mean max_batch_size"),
    ("modells = 4", r"some\.toml: modells = 4: there is no such setting\. Did you mean models\?"),
    ("[modells.a]", r"some\.toml: modells = '…': there is no such setting\. Did you mean models\?"),
    (
        "[model.a]\nx = 1",
        r"some\.toml: model = '…': is a table, but must be a string\. Write \[models\.a\]; `model` is",
    ),
    ("model = {}", r"some\.toml: model = '…': is a table, but must be a string\. Write \[models\.NAME\]; `model` is"),
    ("[models.a]\ntaget = 4", r"some\.toml: \[models\.a\] taget = 4: there is no such setting\. Did you mean target\?"),
    ("[models.a]\nversoin = 4", r"\[models\.a\] versoin = 4: there is no such setting\. Did you mean version\?"),
    (
        "[server]\nport = 80\nhost = 'a'",
        r"server = '…': there is no such setting\. Settings are not in tables: write port, host at the top",
    ),
    ("[server]\nprt = 80", r"server = '…': there is no such setting\. Remove it"),
    ("zzzzzz = 4", r"some\.toml: zzzzzz = 4: there is no such setting\. Remove it"),
    (
        "[target.arguments]\nsize = 3",
        r"target = .….: there is no such setting\. Name it on the command line, with the arguments of",
    ),
    ("port = ", r"--config = '.*some\.toml': is not valid TOML"),
    ("port = " + "9" * 5000, r"--config = '.*some\.toml': is not valid TOML"),
    ("x = " + "[" * 50_000, r"--config = '.*some\.toml': is not valid TOML"),
    ("queue_timeout_ms = " + "9" * 400, r"some\.toml: queue_timeout_ms = 9+: must be a number"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES, ids=lambda value: value[:30])
def test_a_bad_file_is_named_with_its_key(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    file.write_text(text)
    with pytest.raises(SettingError, match=message):
        load({}, {}, file)


def test_a_file_that_cannot_be_read_is_a_setting_error(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    for file, reason in (
        (tmp_path / "none.toml", "no such file"),
        (tmp_path / "binary.toml", "is not valid TOML"),
        (tmp_path, "is not a regular file"),
        (Path("/dev/null"), "is not a regular file"),
    ):
        with pytest.raises(SettingError, match=reason):
            load({}, {}, file)
    with pytest.raises(SettingError, match=r"^HEADWAY_CONFIG = "):
        load({}, {"HEADWAY_CONFIG": str(tmp_path / "none.toml")})


def test_a_headway_toml_that_is_no_file_is_not_overlooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a mount's source is missing, a folder of that name is created, and tokens and keys would be silently lost."""
    monkeypatch.chdir(tmp_path)
    assert load({}, {}) == Settings()
    Path("headway.toml").mkdir()
    with pytest.raises(
        SettingError, match=r"^the settings file = '/.*headway\.toml': is not a regular file.*remove it"
    ):
        load({}, {})
    Path("headway.toml").rmdir()
    Path("headway.toml").symlink_to("nowhere")
    with pytest.raises(SettingError, match=r"^the settings file = '/.*headway\.toml': no such file.*remove it"):
        load({}, {})


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    canary = "can\x01ary"
    assert "canary" not in repr(Settings(admin_token="canary", remote_token="canary"))
    for name in ("admin_token", "remote_token"):
        for flags, environ in (({name: canary}, {}), ({}, {f"HEADWAY_{name.upper()}": canary})):
            with pytest.raises(SettingError) as caught:
                load(flags, environ)
            assert "ary" not in str(caught.value)
    for text in ("admin_token = [ 'canary' ]", "admin_tokens = 'canary'"):
        file = tmp_path / "some.toml"
        file.write_text(text)
        with pytest.raises(SettingError) as caught:
            load({}, {}, file)
        assert "canary" not in str(caught.value)


def test_tiers_and_devices_are_derived_from_their_settings() -> None:
    settings = Settings(tiers="gold, silver", default_tier="silver", workers=2, devices="3, 5")
    assert settings.tier_names == ("gold", "silver")
    assert settings.default_tier_index == 1
    assert settings.device_ids == ("3", "5")
    assert Settings(workers=3).device_ids == ()
    assert Settings(workers=3, devices="cpu").device_ids == ("cpu", "cpu", "cpu")


def test_there_are_as_many_workers_as_devices_are_named() -> None:
    assert load({"devices": "3,5"}, {}).workers == 2
    assert load({"devices": "cpu", "workers": "4"}, {}).workers == 4
    assert load({}, {"HEADWAY_DEVICES": "cpu"}).workers == 1


def test_only_loopback_hosts_count_as_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "")] == [False] * 5


def test_every_field_says_what_it_is_in_its_group() -> None:
    for name, field in FIELDS.items():
        assert field.help.endswith("."), name
        assert field.group, name
        assert flag(name) == "--" + name.replace("_", "-")
        if name.endswith("_ms"):
            assert field.unit == "ms", name


names = st.sampled_from(sorted(FIELDS))
texts = st.text(max_size=40) | st.sampled_from(["0", "-1", "1", "10", "1e6", "inf", "true", "a,b", "tcp://x", "::1"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.lists(st.integers(), max_size=2)


@given(st.dictionaries(names, scalars, max_size=4), st.dictionaries(names, texts, max_size=4))
def test_any_value_anywhere_is_settings_or_a_setting_error(flags: dict[str, Any], environ: dict[str, str]) -> None:
    for given_flags, given_environ in ((flags, {}), ({}, environ)):
        try:
            settings = load(given_flags, {f"HEADWAY_{name.upper()}": text for name, text in given_environ.items()})
        except SettingError as exc:
            assert exc.setting.removesuffix(" (its default)").startswith(("--", "HEADWAY_"))
            str(exc).encode("utf-8", "backslashreplace")
        else:
            assert dataclasses.replace(settings) == settings


@pytest.mark.parametrize(
    ("setting", "url"),
    [
        ("broker", "redis://127.0.0.1:6379/0"),
        ("broker", "redis://broker"),
        ("broker", "rediss://user:p%40ss%2Fword@broker.example:6380/3?ssl_ca_certs=%2Fetc%2Fca.pem"),
        ("broker", "redis://:secret@[::1]:6379"),
        ("broker", "redis+sentinel://10.0.0.1:26379,10.0.0.2:26379/mymaster"),
        ("broker", "rediss+sentinel://:secret@a,b,c/mymaster/2"),
        ("broker", "redis+cluster://a:7000,b:7001"),
        ("broker", "rediss+cluster://user:secret@a"),
        ("ledger", "sqlite:///headway.db"),
        ("ledger", "sqlite:////var/lib/headway.db"),
        ("ledger", "postgresql://headway@127.0.0.1/headway"),
        (
            "ledger",
            "postgres://user:p%40ss%2Fword@db.example:6432/headway?sslmode=verify-full&sslrootcert=%2Fetc%2Fca.pem",
        ),
        ("ledger", "postgresql://user:12345678@[::1]:5432/x"),
        ("ledger", "postgresql://user@[fe80::1%25eth0]/x"),
        ("ledger", "postgresql://a:5432,b:,c/x"),
        ("ledger", "postgresql://%2Frun%2Fpostgresql/x"),
        ("ledger", "postgresql:///x?host=/run/postgresql,b:5433&port=5432"),
        ("ledger", "postgresql://user@db/x?user=a@b"),
    ],
)
def test_a_url_of_each_kind_of_broker_and_database_is_taken(setting: str, url: str) -> None:
    assert getattr(load({setting: url}, {}), setting) == url


@pytest.mark.parametrize(
    ("setting", "url", "reason", "hint"),
    [
        *(
            ("HEADWAY_BROKER", *row)
            for row in (
                ("127.0.0.1:6379", "is not the URL of a Redis or Valkey", "Begin it with redis://, rediss://"),
                ("http://broker", "is not the URL of a Redis or Valkey", "Begin it with redis://, "),
                ("REDIS://broker", "is not the URL of a Redis or Valkey", "redis://"),
                ("redis://", "names no host and port", "For example redis://127.0.0.1:6379/0."),
                ("redis://broker:99999", "names no host and port", "For example"),
                ("redis://broker:0", "names no host and port", "For example"),
                ("redis://broker:port", "names no host and port", "For example"),
                ("redis://:se/cret@broker", "names no host and port", "%2F"),
                ("redis://bro ker", "contains a space", "Percent-encode it."),
                ("redis://bröker", "non-ASCII", "Percent-encode it."),
                ("redis://a,b", "names several hosts", "redis+sentinel:// or redis+cluster://"),
                ("redis://broker/zero", "names a database that is not a number", "For example"),
                ("redis://broker/2147483648", "names a database with too high a number", "For example"),
                (f"redis://broker/{'9' * 5000}", "names a database with too high a number", "For example"),
                ("redis+sentinel://a,b/master/2147483648", "names a database with too high a number", "For example"),
                ("redis+sentinel://a,b", "names no service", "/mymaster."),
                ("redis+sentinel://a,b/", "names no service", "/mymaster."),
                ("redis+cluster://a,b/3", "names a database, but a cluster has only one", "Leave it out."),
                ("redis://broker?decode_responses=true", "has an unknown option", "ssl_ca_certs, ssl_certfile"),
                ("redis://broker?ssl_ca_certs=ca.pem", "does not use TLS", "Begin it with rediss://."),
                ("rediss://broker?ssl_ca_certs=ca.pem&sentinel_password=p", "names no Sentinels", "Leave it out."),
                ("redis://broker#1", "contains a #", "%23"),
            )
        ),
        *(
            ("HEADWAY_LEDGER", *row)
            for row in (
                ("headway.db", "is not the URL of a database", "For example sqlite:///headway.db or postgresql://"),
                ("sqlite:///a?mode=canary", "contains a ? or #", "Write only the path"),
                ("sqlite:///a#1", "contains a ? or #", "Write only the path"),
                ("sqlite:///", "is not the URL of a database", "For example"),
                ("mysql://canary@h/x", "is not the URL of a database", "For example"),
                (
                    "postgresql://a:canary@127.0.0.1:99999/x",
                    "names a port that is not a number from 1 to 65535",
                    "HOST:PORT",
                ),
                ("postgresql://a:canary@127.0.0.1:0/x", "names a port", "HOST:PORT"),
                ("postgresql://a:canary@127.0.0.1:-1/x", "names a port", "HOST:PORT"),
                ("postgresql://a:canary@127.0.0.1:port/x", "names a port", "HOST:PORT"),
                ("postgresql://a,[::1]:65536/x", "names a port", "HOST:PORT"),
                ("postgresql://a/x?port=5432,70000", "names a port", "HOST:PORT"),
                ("postgresql://a/x?host=b:70000", "names a port", "HOST:PORT"),
                ("postgresql://a:can/ary@127.0.0.1/x", "names a port", "In a password / is written %2F"),
                ("postgresql://a:1#canary@127.0.0.1/x", "contains a #", "# %23"),
                ("postgresql://a:can@ary@127.0.0.1/x", "contains more than one @", "@ %40"),
            )
        ),
    ],
)
def test_a_url_that_is_no_brokers_or_databases_is_refused(setting: str, url: str, reason: str, hint: str) -> None:
    with pytest.raises(SettingError) as caught:
        load({}, {setting: url})
    assert caught.value.setting == setting
    assert reason in caught.value.reason and hint in caught.value.hint
    assert "canary" not in str(caught.value) and "ary@" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://broker:6379/0", "redis://broker:6379/0"),
        ("redis://user:canary@broker:6379/0", "redis://…@broker:6379/0"),
        ("redis://:can@ary@broker", "redis://…@broker"),
        ("rediss+cluster://canary@a:1,b:2", "rediss+cluster://…@a:1,b:2"),
        ("redis://broker/0?password=canary", "redis://broker/0"),
        ("redis://broker/0?password=canary@ary", "…"),
        ("redis://:can?ary@broker", "…"),
        ("redis://:can#ary@broker", "…"),
        ("redis://user:can ary@", "…"),
        ("user:canary@broker", "…"),
        ("broker", "broker"),
        ("sqlite:///some/where/headway.db", "sqlite:///some/where/headway.db"),
        ("sqlite:///headway.db?key=canary", "sqlite:///headway.db"),
        ("", ""),
    ],
)
def test_a_brokers_password_is_never_shown(url: str, shown: str) -> None:
    assert shown_url(url) == shown
    for text in (url, f"{url} ", f"x{url}"):
        try:
            told = repr(load({"broker": text}, {}))
        except SettingError as exc:
            told = str(exc)
        assert "canary" not in told
        assert "ary@" not in told


def test_a_setting_that_does_nothing_without_another_one_is_told() -> None:
    lacking: list[tuple[str, Any, str]] = [
        ("fallback", "model.py:small", "broker"),
        ("shards", 16, "broker"),
        ("broker_prefix", "other", "broker"),
        ("ledger_content", True, "ledger"),
        ("bulk_max_bytes", 1 << 30, "bulk_dir"),
    ]
    for name, value, other in lacking:
        assert idle(Settings(**{name: value})) == [(name, other)]
    broker = {"broker": "redis://127.0.0.1:6379/0", "shards": 16, "fallback": "model.py:small"}
    others = {"ledger": "sqlite:///headway.db", "ledger_content": True}
    assert idle(Settings(**broker, **others)) == []  # type: ignore[arg-type]
    assert idle(Settings()) == []
