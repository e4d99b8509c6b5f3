"""Settings of several models: where they are written, what follows from them, and what is said of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config import FIELDS, Settings, load
from headway.config.models import MODEL_FIELDS, ONE_VERSION, ModelSettings, split_target
from headway.errors import SettingError

TWO = """
max_batch_size = 64
[models.upper]
target = "up.py:f"
max_batch_size = 100
[models."org/embed.v1"]
target = "emb.py:Embedder"
version = "3"
policy = "window"
cache = true
request_timeout_ms = 1000
arguments = { size = "small" }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "headway.toml"
    path.write_text(TWO)
    return path


def test_each_model_has_its_own_settings_over_those_of_the_process(file: Path) -> None:
    served = load({"reserved_share": "0.2"}, {}, file).served
    assert list(served) == ["upper", "org/embed.v1"]
    upper, embed = served.values()
    assert (upper.max_batch_size, upper.policy, upper.cache, upper.model_version) == (100, "paced", False, "1")
    assert (embed.max_batch_size, embed.policy, embed.cache, embed.model_version) == (64, "window", True, "3")
    assert (upper.reserved_share, embed.reserved_share) == (0.2, 0.2)
    assert embed.queue_timeout_ms == 1000.0, "a shorter time in all shortens the wait, as elsewhere"
    assert embed.target_arguments == "size='small'"
    assert (upper.model, upper.models) == ("upper", ())


def test_without_a_table_the_process_is_the_one_model() -> None:
    settings = load({"model": "m"}, {})
    assert settings.served == {"m": settings}
    assert settings.default == "m"


def test_the_command_line_says_which_models_and_the_file_how(file: Path) -> None:
    def chosen(*targets: str, **flags: str) -> list[tuple[str, str]]:
        return [(one.name, one.target) for one in load(flags, {}, file, targets=targets).models]

    assert chosen("upper") == [("upper", "up.py:f")]
    assert chosen("upper=other.py:g", "c=d.py:e") == [("upper", "other.py:g"), ("c", "d.py:e")]
    assert chosen("x.py:f") == [], "a single target is the model that --model names"
    assert chosen("x.py:f", model="upper") == [("upper", "")]
    assert load({"model": "upper"}, {}, file, targets=["x.py:f"]).served["upper"].max_batch_size == 100
    assert [one.name for one in load({}, {}, file).models] == ["upper", "org/embed.v1"]
    assert [(one.name, one.target) for one in load({}, {}, file, targets={"upper": None}).models] == [("upper", "")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a=b.py:f", ("a", "b.py:f")),
        ("org/m.v1=b:f(x='=')", ("org/m.v1", "b:f(x='=')")),
        ("m=https://host/v1/completions?x=1", ("m", "https://host/v1/completions?x=1")),
        ("b.py:f(x='a')", None),
        ("https://host/path=1", None),
        ("b.py:f", None),
        ("=b.py:f", None),
    ],
)
def test_a_name_before_a_target_is_told_from_a_target(text: str, found: tuple[str, str] | None) -> None:
    assert split_target(text) == found


def test_an_unnamed_request_means_the_only_model_or_the_chosen_one() -> None:
    a, b = ModelSettings("a"), ModelSettings("b")
    assert Settings(models=(a,)).default == "a"
    assert Settings(models=(a, b)).default == ""
    assert Settings(models=(a, b), default_model="b").default == "b"
    assert Settings(models=(a, b), model="b").default == "b"


def test_the_longest_times_are_those_of_the_most_patient_model() -> None:
    slow = ModelSettings("slow", values=(("request_timeout_ms", 60_000.0), ("task_timeout_ms", 90_000.0)))
    settings = Settings(models=(ModelSettings("quick"), slow))
    assert (settings.longest_request_s, settings.longest_task_s) == (60.0, 90.0)


def test_workers_follow_the_devices_of_each_model() -> None:
    tables = {"devices": "0,1"}
    models = (ModelSettings("a", values=tuple({**tables, "workers": 2}.items())),)
    assert Settings(models=models).served["a"].device_ids == ("0", "1")


@pytest.mark.parametrize(
    ("settings", "own", "named", "reason"),
    [
        ({"workers": 1, "models_per_gpu": 3}, {"min_warm": 2}, "models.a.min_warm", "more than there are GPUs"),
        ({"workers": 1, "models_per_gpu": 2}, {"min_warm": 3}, "models.a.min_warm", "more than there are GPUs"),
        ({"workers": 2, "models_per_gpu": 1, "min_warm": 1}, {"min_warm": 2}, "models_per_gpu", "2 GPUs hold 2 models"),
        ({"workers": 1, "models_per_gpu": 1}, {"min_warm": 1}, "models_per_gpu", "keeps 1 of them loaded"),
        ({"workers": 2, "models_per_gpu": 1}, {"workers": 1}, "models_per_gpu", "model a has workers of its own"),
        ({"models_per_gpu": -1}, {}, "models_per_gpu", "must lie between 0 and 256"),
    ],
)
def test_models_that_share_gpus_must_fit_there(
    settings: dict[str, int], own: dict[str, int], named: str, reason: str
) -> None:
    models = (ModelSettings("a", values=tuple(own.items())), ModelSettings("b"))
    with pytest.raises(SettingError) as told:
        Settings(models=models, **settings)  # type: ignore[arg-type]
    assert told.value.setting == named
    assert reason in told.value.reason


def test_models_that_share_gpus_may_all_be_kept_loaded() -> None:
    models = (
        ModelSettings("a", values=(("min_warm", 2), ("workers", 2))),
        ModelSettings("b", values=(("min_warm", 1),)),
    )
    served = Settings(models=models, workers=2, models_per_gpu=2).served
    assert [one.min_warm for one in served.values()] == [2, 1]


@pytest.mark.parametrize(
    ("table", "named", "reason"),
    [
        ("[models.a]\nport = 3", "[models.a] port = 3", "is a setting of the process"),
        ("[models.a]\nmax_batch = 3", "[models.a] max_batch = 3", "Did you mean max_batch_size?"),
        ('[models.a]\nmax_batch_size = "3"', "[models.a] max_batch_size = '3'", "must be a whole number"),
        ("[models.a]\nmax_batch_size = 0", "[models.a] max_batch_size = 0", "must lie between 1 and 4096"),
        ("[models.'a.b']\nmax_batch_size = 0", "[models.a.b] max_batch_size = 0", "must lie between"),
        ("[models.a]\nversion = '1'\nmodel_version = '2'", "[models.a] = 'a'", "has both"),
        ("[models.'a b']", "[models.a b] = 'a b'", "must be 1 to 128 letters"),
        ("[models.a]\ntarget = 3", "[models.a] target", "must be text"),
        ("[models.a]\narguments = 3", "[models.a] arguments", "is no table of the arguments"),
        ("[models.a]\nqueue_timeout_ms = 9000", "[models.a] queue_timeout_ms = 9000", "is longer than"),
        ("[models.a]\nversion = 3", "[models.a] version = 3", "must be text"),
        ("[models.a]\nversion = 'a b'", "[models.a] version = 'a b'", "must be 1 to 128 letters"),
        ("[models.minilm-v1.5]\ntarget = 'a:b'", "[models.minilm-v1] 5", 'put that in quotes: [models."minilm-v1.5"]'),
        ("models_per_gpu = 2\n[models.a]\nmin_warm = 3", "[models.a] min_warm = 3", "more than there are GPUs"),
        ("models = 3", "models", "is no table of models"),
        ("[models]\na = 3", "[models.a]", "is no table"),
        ("[models.a]\nmax_wait_ms = 3000", "[models.a] max_wait_ms", "`queue_timeout_ms`"),
    ],
)
def test_a_wrong_table_is_told_with_the_line_that_is_wrong(table: str, named: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(table)
    with pytest.raises(SettingError) as caught:
        load({}, {}, path)
    assert f"{path}: {named}" in str(caught.value)
    assert reason.replace("`queue_timeout_ms`", "--queue-timeout-ms") in str(caught.value)


@pytest.mark.parametrize(
    ("table", "hint"),
    [
        ("[models.org/a]\ntarget = 'm.py:f'", 'Put the name of the model in quotes: [models."org/a"].'),
        ("[models.a]\n[models.a b]", 'Put the name of the model in quotes: [models."a b"].'),
        ("[models.a]\nversion='1'\n[models.a]\nversion='2'", ONE_VERSION),
        ('[models."a/b"]\nport = ', "Mend the file."),
    ],
)
def test_a_file_that_is_no_toml_for_the_names_of_its_models_says_how_to_write_them(
    table: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "some.toml"
    path.write_text(table)
    with pytest.raises(SettingError, match="is not valid TOML") as caught:
        load({}, {}, path)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("table", "targets"),
    [
        ("[[models.a]]\nversion = '3'\n[[models.a]]\nversion = '4'", None),
        ("[models.a.3]\ntarget = 'm.py:f'\n[models.a.4]\ntarget = 'm.py:g'", None),
        ("", ["a=m.py:f", "a=m.py:g"]),
        ("", ["a@3=m.py:f", "a@4=m.py:g"]),
    ],
)
def test_who_gives_a_process_two_versions_of_a_model_is_told_how_to_run_them(
    table: str, targets: list[str] | None, tmp_path: Path
) -> None:
    path = tmp_path / "some.toml"
    path.write_text(table)
    with pytest.raises(SettingError) as caught:
        load({}, {}, path, targets=targets)
    assert ONE_VERSION in caught.value.hint


@pytest.mark.parametrize("targets", [["a.py:f", "b.py:g"], ["a=x.py:f", "a=y.py:f"], ["a=x.py:f", "y.py:f"]])
def test_several_targets_need_a_name_each(targets: list[str]) -> None:
    with pytest.raises(SettingError, match="TARGET"):
        load({}, {}, targets=targets)


def test_what_a_model_may_have_of_its_own_are_settings() -> None:
    assert set(MODEL_FIELDS) < set(FIELDS)
    assert len(set(MODEL_FIELDS)) == len(MODEL_FIELDS)


def test_a_secret_of_a_model_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text('[models.a]\ntarget = "https://host/?key=s3cret"\nremote_token = "s3cret"\n')
    assert "s3cret" not in repr(load({}, {}, path))
