import os
import re
from pathlib import Path

import pytest

from headway.app.backends import source_folder, target_digest
from headway.config.target import (
    FileTarget,
    ModuleTarget,
    ObservedTarget,
    RemoteTarget,
    Target,
    parse_target,
    shown_target,
)
from headway.errors import TargetError


def test_a_module_and_an_attribute_are_read_as_a_module_target() -> None:
    assert parse_target("app.models:predict") == ModuleTarget("app.models", "predict")
    assert str(parse_target("app:small.predict")) == "app:small.predict"


def test_a_path_and_an_attribute_are_read_as_a_file_target(tmp_path: Path) -> None:
    path = tmp_path / "my (own) model.py"
    path.touch()
    assert parse_target(f"{path}:predict") == FileTarget(path, "predict")
    assert parse_target(f"{path}:Model(n=1)") == FileTarget(path, "Model", "n=1")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9100/batch", "https://models.example/v1?key=1", "http://[::1]/"])
def test_an_http_url_is_read_as_a_remote_target(url: str) -> None:
    assert parse_target(url) == RemoteTarget(url)


def test_a_query_is_not_shown() -> None:
    target = parse_target("https://models.example/v1?key=canary#canary")
    assert str(target) == "https://models.example/v1"
    assert "canary" not in repr(target)


@pytest.mark.parametrize(
    "text",
    [
        "ftp://host/x?key=canary",
        "http:///batch?key=canary",
        "http://user:canary@host:port/batch",
        "http://user:can?ary@host/batch?key=canary",
        "http://user:canary/@host/batch",
        "http://host/a b?key=canary",
        "http://host/batch?mail=me@canary",
        "user:canary@host/batch",
        "host/batch?key=canary",
        "https//user:canary@host:canary",
    ],
)
def test_an_error_repeats_neither_query_nor_password(text: str) -> None:
    try:
        shown = str(parse_target(text))
    except TargetError as exc:
        shown = str(exc)
    assert "canary" not in shown
    assert "can?" not in shown


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no function"),
        ("app", "names no function"),
        ("app.predict", "Write app:predict"),
        ("app.py", "Write app.py:NAME"),
        ("app:", "is not the name of a function"),
        ("app:pre dict", "'pre dict' is not the name"),
        ("app:a..b", "is not the name"),
        (":predict", "is neither a module nor a .py file"),
        ("my-app:predict", "is neither a module nor a .py file"),
        ("missing/app.py:predict", "there is no file missing/app.py"),
        ("folder.py:predict", "folder.py is a folder. Name a file in it"),
        ("missing/app:predict", "is not a .py file"),
        ("ftp://host/x", "Use http://, grpc://, grpcs:// or https://"),
        ("http:///batch", "names no host"),
        ("http://host:99999/", "is not a valid URL"),
        ("http://[::1/", "is not a valid URL"),
        ("http://host/a b", "Percent-encode"),
        ("https://user:secret@host/x", "remote_token"),
        ("app:Model(path='canary'", "Close them with )"),
        ("app:Model(path=canary)", "argument path is not a literal"),
        ("app:Model(open('canary'))", "argument 1 is not a literal"),
        ("app:Model(**{'a': 'canary'})", "** is not a literal"),
        ("app:Model(f'canary')", "argument 1 is not a literal"),
        ("app:Model('canary' * 9)", "argument 1 is not a literal"),
        ("app:Model('canary') or g('x')", "not written as in a call"),
        ("app:Model(a='canary', a=2)", "argument a is given twice"),
        ("app:Model('canary\0')", "not written as in a call"),
        (f"app:Model({'(' * 5000}'canary'{')' * 5000})", "not written as in a call"),
        ("missing.py:Model(path='canary')", "there is no file"),
    ],
)
def test_a_wrong_target_is_named(text: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.py").mkdir()
    with pytest.raises(TargetError) as caught:
        parse_target(text)
    hidden = "secret" in text or "canary" in text
    assert str(caught.value).startswith(f"TARGET {text!r}: ") or hidden
    assert says in str(caught.value)
    assert "secret" not in str(caught.value) and "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("app:Model()", ""),
        ("app:Model(path='s3://x/y:z', size=3)", "path='s3://x/y:z', size=3"),
        ("app:sub.Model( 'a', [1, (2, None)] ) ", " 'a', [1, (2, None)] "),
        ("app:Model('http://user@host/?q=(1)')", "'http://user@host/?q=(1)'"),
    ],
)
def test_a_target_may_have_arguments(text: str, arguments: str) -> None:
    target = parse_target(text)
    assert isinstance(target, ModuleTarget)
    assert target.arguments == arguments


def test_arguments_are_shown_without_their_values() -> None:
    target = parse_target("app:Model('canary', key='canary')")
    assert str(target) == "app:Model(…, key=…)"
    assert "canary" not in repr(target)
    assert shown_target("app:Model('canary', key='canary')") == "app:Model(…)"


@pytest.mark.parametrize("text", ["127.0.0.1:22100/x", "127.0.0.1:22100", "api.example:80/v1/batch", "[::1]:80/x"])
def test_an_address_without_its_scheme_is_no_module(text: str) -> None:
    with pytest.raises(TargetError, match=f"without its scheme. Write http://{re.escape(text)}"):
        parse_target(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parts").mkdir()
    for name in ("model.py", "parts/__init__.py", "parts/words.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    return tmp_path


def of_file(folder: Path, **changed: object) -> FileTarget:
    return FileTarget(**{"path": folder / "model.py", "attribute": "answer", **changed})  # type: ignore[arg-type]


def test_it_is_of_what_the_target_is_named_and_of_its_arguments(folder: Path) -> None:
    others = (of_file(folder, attribute="other"), of_file(folder, arguments="'big'"), RemoteTarget("http://a/v1"))
    digests = {target_digest(target) for target in (of_file(folder), *others)}
    assert len(digests) == 4
    assert all(len(digest) == 12 for digest in digests)


@pytest.mark.parametrize("name", ["model.py", "parts/words.py", "parts/new.py"])
@pytest.mark.parametrize("target", ["file", "module", "package"])
def test_it_is_of_the_python_files_in_the_folder_and_below(folder: Path, name: str, target: str) -> None:
    spec: Target = of_file(folder)
    if target != "file":
        spec = ModuleTarget("model" if target == "module" else "parts.words", "answer", folder=str(folder))
    before = target_digest(spec)
    (folder / name).write_text("# changed\n")
    assert (target_digest(spec) == before) is (target == "package" and name == "model.py")


def test_it_is_the_same_for_the_same_files_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for file in folder.rglob("*.py"):
        copy = elsewhere / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(file.read_bytes())
    (elsewhere / "notes.txt").write_text("no code")
    (elsewhere / ".venv").mkdir()
    (elsewhere / ".venv" / "foreign.py").write_text("not the user's")
    assert target_digest(of_file(folder)) == target_digest(of_file(elsewhere))


def test_a_file_that_was_written_anew_counts_only_where_it_is_watched(folder: Path) -> None:
    spec = of_file(folder)
    before, watched = target_digest(spec), target_digest(spec, stamps=True)
    os.utime(folder / "model.py", ns=(0, 5))
    assert target_digest(spec) == before
    assert target_digest(spec, stamps=True) != watched


def test_of_an_installed_package_it_is_of_the_package_and_of_others_of_the_name_alone(folder: Path) -> None:
    installed = ModuleTarget("msgspec", "json", folder=str(folder))
    assert source_folder(installed) is None
    assert target_digest(installed) != target_digest(ModuleTarget("no_such_module", "json", folder=str(folder)))


def test_nothing_is_known_of_a_target_that_is_only_observed() -> None:
    assert target_digest(ObservedTarget(len, [])) == ""
    assert source_folder(RemoteTarget("http://a/v1")) is None
