"""API keys as strings and in files: the accepted forms, and how they are written."""

import asyncio
import fcntl
import itertools
import os
import string
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headway.errors import SettingError, StoreUnavailable
from headway.identity.api_keys.credential import LIVE, NOISE, SERVICE, digest, generate, is_id, parse
from headway.identity.api_keys.file import KeysFile
from headway.model import ApiKey, ModelLimit
from headway.ports import KeyMark
from headway.runtime import shared_files
from tests.contracts.test_key_stores import told
from tests.identity.writing import digest_of, entry, id_of, key_of

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


instant = itertools.count(1_700_000_000)


def written(folder: Path, text: str | bytes) -> KeysFile:
    """Write a file of keys. Its modification time is new, however coarse the file system's timestamps are."""
    path = folder / "keys.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(path, (at := next(instant), at))
    return KeysFile(path)


def key(name: str, **changed: Any) -> ApiKey:
    usual: dict[str, Any] = {"user": "ada", "tenant": "acme", "tier": "paid", "created_at": 5.0}
    return ApiKey(id=id_of(name), digest=digest_of(name), **{**usual, **changed})


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    more = 'model_limits = {a = {rate = 6}, "b" = {rate = 1.5, burst = 3}}\nmodels = ["a", "b"]\nrate = 60\nburst = 5\ncreated_at = 2026-11-01T12:00:00Z\nexpires_at = 1800000000'
    store = written(tmp_path, "# by hand\n" + entry("second", more=more) + entry("first", "bob"))
    run(store.open())
    first, second = run(store.keys())
    assert first == key("first", user="bob", created_at=0.0)
    assert second == key(
        "second", models=("a", "b"), rate=60.0, burst=5.0, created_at=1793534400.0, expires_at=1800000000.0,
        model_limits=(ModelLimit("a", 6.0), ModelLimit("b", 1.5, 3.0)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "setting", "says"),
    [
        (b"\xff", "keys", "not valid TOML"),
        ("key = 3", "keys", "key"),
        ("keys = 3", "keys", "Expected `array`"),
        (entry("a") + '[[keys]]\nuser = "x"', "keys[2]", "missing"),
        (entry("a") + entry("b", more="admin = true"), "keys[2]", "admin"),
        (entry("a", more='rate = "fast"'), "keys[1]", "rate"),
        (entry("a", more="rate = -1"), "keys[1].rate", "between"),
        (entry("a", more="burst = inf"), "keys[1].burst", "between"),
        (entry("a", more="expires_at = 2026-11-01T12:00:00"), "keys[1].expires_at", "time zone"),
        (entry("a", more="created_at = nan"), "keys[1].created_at", "Unix time"),
        (entry("a", more='models = [""]'), "keys[1].models", "must be model names"),
        (entry("a", more='models = ["a"]\n[keys.model_limits.b]\nrate = 1'), "keys[1].model_limits", "may use"),
        (entry("a", more="model_limits = {b = {rate = 0}}"), "keys[1].model_limits.b.rate", "above 0"),
        (entry("a", more="model_limits = {b = {rate = 1, burst = 0.5}}"), "keys[1].model_limits.b.burst", "between"),
        (entry("a", more="model_limits = {b = {burst = 1}}"), "keys[1]", "rate"),
        (entry("a", more='model_limits = {"" = {rate = 1}}'), "keys[1].model_limits", "must be a model name"),
        (entry("a") + entry("a", "eve"), "keys[2].id", "keys[1]"),
        (entry("a").replace(id_of("a"), "short"), "keys[1].id", "12 letters and digits"),
        (entry("a", user=""), "keys[1].user", "printable"),
        (entry("a").replace('sha256 = "', 'sha256 = "x'), "keys[1].sha256", "64 hexadecimal digits"),
    ],
)
def test_a_wrong_file_says_where_and_why(text: str | bytes, setting: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError) as caught:
        run(written(tmp_path, text).open())
    assert setting in caught.value.setting
    assert says in f"{caught.value.setting} {caught.value.reason}"
    assert caught.value.hint


def test_an_unreadable_file_and_a_misspelt_ledger_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match="cannot be read"):
        run(KeysFile(tmp_path).open())
    with pytest.raises(SettingError, match=r"No such file or directory\. Did you mean ledger"):
        run(KeysFile(Path("ledgr")).open())
    with pytest.raises(SettingError, match=r"directory\. Name a readable file"):
        run(KeysFile(Path("keys.toml")).open())


def test_a_key_pasted_into_the_wrong_place_is_not_repeated(tmp_path: Path) -> None:
    secret = key_of("a")
    for text in (
        entry("a").replace(digest_of("a").hex(), secret),
        entry("a").replace(id_of("a"), secret),
        f'[[keys]]\nsha256 = "{secret}"',
        entry("a", more=f'key = "{secret}"'),
    ):
        with pytest.raises(SettingError) as caught:
            run(written(tmp_path, text).open())
        assert "canary" not in str(caught.value)


def test_the_first_key_makes_the_file_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    store = KeysFile(path, create=True)
    run(store.open())
    assert run(store.keys()) == []
    assert not path.exists()
    run(store.add(key("a")))
    assert path.stat().st_mode & 0o777 == 0o600
    assert run(KeysFile(path).keys()) == [key("a")]
    assert [one.name for one in tmp_path.iterdir()] == ["keys.toml"], "nothing else is left"


def test_another_file_keeps_its_permissions_and_its_place(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    real.mkdir()
    store = written(real, entry("a"))
    (real / "keys.toml").chmod(0o640)
    (tmp_path / "link.toml").symlink_to(real / "keys.toml")
    run(KeysFile(tmp_path / "link.toml").add(key("b")))
    assert (tmp_path / "link.toml").is_symlink()
    assert (real / "keys.toml").stat().st_mode & 0o777 == 0o640
    assert len(run(store.keys())) == 2


texts = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "), min_size=1, max_size=20)
numbers = st.none() | st.floats(0, 1e9)
instants = st.integers(0, 4_000_000_000_000).map(lambda number: number / 1000)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    made=st.builds(
        ApiKey,
        id=st.text("0123456789abcXYZ", min_size=12, max_size=12),
        digest=st.binary(min_size=32, max_size=32),
        user=texts,
        tenant=texts,
        tier=texts,
        models=st.lists(texts, max_size=3).map(tuple),
        rate=numbers,
        burst=numbers,
        created_at=instants,
        expires_at=st.none() | instants,
        replaces=st.sampled_from(("", "0123456789ab")),
        model_limits=st.dictionaries(
            texts, st.tuples(st.floats(1e-9, 1e9), st.none() | st.floats(1, 1e9)), max_size=3
        ).map(lambda limits: tuple(ModelLimit(model, *limit) for model, limit in limits.items())),
    ).map(
        lambda key: msgspec.structs.replace(
            key, models=key.models and (*key.models, *(one.model for one in key.model_limits))
        )
    )
)
def test_what_is_written_is_read_the_same(made: ApiKey, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.unlink(missing_ok=True)
    store = KeysFile(path)
    run(store.add(made))
    assert run(store.get(made.id)) == made


def test_a_writer_that_stays_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_files, "LOCK_WITHIN", 0.0)
    store = written(tmp_path, entry("a"))
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailable, match="another process"):
            run(store.expire(id_of("a"), 9.0))
    finally:
        os.close(folder)
    assert run(store.expire(id_of("a"), 9.0))


async def test_changes_by_hand_are_seen(tmp_path: Path) -> None:
    store = written(tmp_path, entry("a") + entry("b"))
    keys, first = await told(store, KeyMark())
    assert {one.id for one in keys} == {id_of("a"), id_of("b")}
    assert await told(store, first) == ([], first)
    written(tmp_path, entry("b", "bob") + entry("c"))
    keys, second = await told(store, first)
    assert second.revision > first.revision
    assert {one.id: (one.user, one.expires_at) for one in keys} == {
        id_of("a"): ("ada", 0.0),
        id_of("b"): ("bob", None),
        id_of("c"): ("ada", None),
    }, "what is gone has expired"
    assert await told(store, second) == ([], second)
    written(tmp_path, entry("a") + entry("b", "bob") + entry("c"))
    keys, _ = await told(store, second)
    assert [(one.id, one.expires_at) for one in keys] == [(id_of("a"), None)]


async def test_a_file_that_becomes_wrong_is_a_store_that_does_not_answer(tmp_path: Path) -> None:
    store = written(tmp_path, entry("a"))
    _, revision = await told(store, KeyMark())
    written(tmp_path, "[[keys]")
    with pytest.raises(StoreUnavailable, match="not valid TOML"):
        await told(store, revision)
    with pytest.raises(StoreUnavailable):
        await store.add(key("b"))
    written(tmp_path, "")
    with pytest.raises(StoreUnavailable, match="is empty, possibly because it is being written"):
        await told(store, revision)
    (tmp_path / "keys.toml").unlink()
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        await told(store, revision)
    written(tmp_path, entry("a", "bob"))
    [now], _ = await told(store, revision)
    assert now == msgspec.structs.replace(key("a", user="bob"), created_at=0.0)


BASE62 = string.digits + string.ascii_letters
noises = st.binary(min_size=NOISE, max_size=NOISE)


@given(noises)
@example(bytes(NOISE))
@example(b"\xff" * NOISE)
def test_what_is_made_is_understood(noise: bytes) -> None:
    text = generate(LIVE, noise)
    found = parse(text.encode())
    assert found is not None
    id, secret = found
    assert text.startswith(f"hw_live_{id}_{secret.decode()}")
    assert len(text) == len("hw_live_") + 12 + 1 + 22 + 6
    assert is_id(id)
    assert set(id + secret.decode()) <= set(BASE62)
    assert len(digest(secret)) == 32


@settings(max_examples=200)
@given(noises, st.data())
def test_one_changed_character_is_noticed(noise: bytes, data: st.DataObject) -> None:
    text = generate(LIVE, noise).encode()
    position = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != text[position]))
    assert parse(text[:position] + bytes([other]) + text[position + 1 :]) is None


@given(noises, st.integers(0, 47))
def test_a_part_of_a_key_or_two_characters_in_the_other_order_are_no_key(noise: bytes, length: int) -> None:
    text = generate(LIVE, noise).encode()
    for part in (text[:length], text[: length + 1], text[length + 1 :], text + text[: length + 1]):
        assert parse(part) is None
    first, second = text[length : length + 1], text[length + 1 : length + 2]
    changed = text[:length] + second + first + text[length + 2 :]
    assert (parse(changed) is None) == (first != second)


@settings(max_examples=200)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(LIVE.__add__)))
@example(b"")
@example(LIVE + b"\xd9\xa1" * 20)
@example(LIVE + b"0" * 12 + b"_" + b"0" * 28)
@example(LIVE + b"0" * 12 + b"_" + b"0" * 28 + b"\n")
@example(b"hw_live_" * 100_000)
def test_other_bytes_are_no_key_and_raise_nothing(text: bytes) -> None:
    assert parse(text) is None


def test_a_service_token_is_no_key_and_too_little_randomness_makes_none() -> None:
    token = generate(SERVICE, bytes(range(NOISE)))
    assert token.startswith("hw_svc_")
    assert parse(token.encode()) is None
    with pytest.raises(ValueError, match="32 random bytes, not 31"):
        generate(LIVE, bytes(NOISE - 1))


@pytest.mark.parametrize("text", ["", "short", "hw_live_0123", "0123456789a-", "0123456789ab\n", "٠١٢٣٤٥٦٧٨٩٠١"])
def test_a_text_of_another_form_is_no_id_of_a_key(text: str) -> None:
    assert not is_id(text)
