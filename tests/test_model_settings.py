"""Settings of several models: where to write them, what follows from them, and the errors for wrong ones."""

from pathlib import Path
from typing import Any

import pytest

from headway.config import Settings, idle, load
from headway.config.target import VERSIONS, ModelSettings, split_target
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
    assert (upper.model, upper.models) == ("upper", ())


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
        ("org/m@v.1=b.py:f", ("org/m@v.1", "b.py:f")),
        ("a@=b.py:f", ("a@", "b.py:f")),
        ("a@1@2=b.py:f", ("a@1@2", "b.py:f")),
        ("https://user@host/path=1", None),
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
    alone = load({"model": "m"}, {})
    assert (alone.served, alone.default) == ({"m": alone}, "m"), "without a table the process is the one model"
    assert Settings(models=(a,)).default == "a"
    assert Settings(models=(a, b)).default == ""
    assert Settings(models=(a, b), default_model="b").default == "b"
    assert Settings(models=(a, b), model="b").default == "b"


def test_the_longest_times_are_those_of_the_most_patient_model() -> None:
    slow = ModelSettings("slow", values=(("request_timeout_ms", 60_000.0), ("task_timeout_ms", 90_000.0)))
    settings = Settings(models=(ModelSettings("quick"), slow))
    assert (settings.longest_request_s, settings.longest_task_s) == (60.0, 90.0)


@pytest.mark.parametrize(
    ("settings", "own", "named", "reason"),
    [
        ({"workers": 1, "models_per_gpu": 3}, {"min_warm": 2}, "models.a.min_warm", "more than there are GPUs"),
        ({"workers": 1, "models_per_gpu": 2}, {"min_warm": 3}, "models.a.min_warm", "more than there are GPUs"),
        ({"workers": 2, "models_per_gpu": 1, "min_warm": 1}, {"min_warm": 2}, "models_per_gpu", "2 GPUs hold 2 models"),
        ({"workers": 1, "models_per_gpu": 1}, {"min_warm": 1}, "models_per_gpu", "keeps 1 of them loaded"),
        ({"workers": 2, "models_per_gpu": 1}, {"workers": 1}, "models_per_gpu", "model a has its own workers"),
        ({"models_per_gpu": -1}, {}, "models_per_gpu", "must lie between 0 and 256"),
    ],
)
def test_models_on_shared_gpus_must_fit(settings: dict[str, int], own: dict[str, int], named: str, reason: str) -> None:
    models = (ModelSettings("a", values=tuple(own.items())), ModelSettings("b"))
    with pytest.raises(SettingError) as told:
        Settings(models=models, **settings)  # type: ignore[arg-type]
    assert told.value.setting == named
    assert reason in told.value.reason


def test_models_that_share_gpus_may_all_be_kept_loaded() -> None:
    a = ModelSettings("a", values=(("min_warm", 2), ("workers", 2)))
    served = Settings(models=(a, ModelSettings("b", values=(("min_warm", 1),))), workers=2, models_per_gpu=2).served
    assert [model.min_warm for model in served.values()] == [2, 1]


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
        ("[models.a]\ntarget = 3", "[models.a] target", "must be a string"),
        ("[models.a]\narguments = {size = 3}", "[models.a] arguments = '…'", 'target = "path/file.py:Class(size=3)"'),
        ("[models.a]\nqueue_timeout_ms = 9000", "[models.a] queue_timeout_ms = 9000", "is longer than"),
        ("[models.a]\nversion = 3", "[models.a] version = 3", "must be a string"),
        ("[models.a]\nversion = 'a b'", "[models.a] version = 'a b'", "must be 1 to 128 letters"),
        ("[models.minilm-v1.5]\ntarget = 'a:b'", "[models.minilm-v1] 5", 'put it in quotes: [models."minilm-v1.5"]'),
        ("models_per_gpu = 2\n[models.a]\nmin_warm = 3", "[models.a] min_warm = 3", "more than there are GPUs"),
        ("models = 3", "models", "is not a table of models"),
        ("[models]\na = 3", "[models.a]", "is not a table"),
        ("[models.a]\nmax_wait_ms = 3000", "[models.a] max_wait_ms", "`queue_timeout_ms`"),
        ("[models.'a@1']\nversion_weights = '1=1'", "[models.a@1] version_weights = '1=1'", 'a table [models."a"].'),
        (
            "[models.'a@1']\nversion = '1'",
            "[models.a@1] version = '1'",
            "is already in the name of its table. Remove it",
        ),
        ("[models.'a@1']\nport = 3", "[models.a@1] port = 3", "is a setting of the process"),
        ("[models.'a@1']\nworkers = 0", "[models.a@1] workers = 0", "must lie between"),
        ("[models.a]\nresult_ttl_s = 0\n[models.'a@1.5']", "[models.a] result_ttl_s = 0", "must lie between"),
        ("[models.'a@b c']", "[models.a@b c] = 'b c'", "must be 1 to 128 letters"),
        ("[models.'a@']", "[models.a@] = ''", "must be 1 to 128 letters"),
        ("[models.'@1']", "[models.@1] = ''", "must be 1 to 128 letters"),
        ("[models.a]\ntarget = 'x:f'\n[models.'a@1']", "[models.a] target", "contradicts [models.a@1]"),
        ("[models.a]\nversion = '3'\n[models.'a@1']", "[models.a] version", "contradicts [models.a@1]"),
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
        ("[models.a]\nversion='1'\n[models.a]\nversion='2'", VERSIONS),
        ('[models."a/b"]\nport = ', "Fix the file."),
    ],
)
def test_a_file_that_is_no_toml_says_how_to_name_models(table: str, hint: str, tmp_path: Path) -> None:
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
        ("", ["a@3=m.py:f", "a@3=m.py:g"]),
        ("", ["a@3=m.py:f", "a=m.py:g"]),
        ("", ["a=m.py:f", "a@3=m.py:g"]),
    ],
)
def test_who_gives_a_process_two_targets_under_one_name_is_told_how_to_write_versions(
    table: str, targets: list[str] | None, tmp_path: Path
) -> None:
    path = tmp_path / "some.toml"
    path.write_text(table)
    with pytest.raises(SettingError) as caught:
        load({}, {}, path, targets=targets)
    assert VERSIONS in caught.value.hint


VERSIONED = """
workers = 2
[models.a]
version_weights = "1=9,2=1"
max_batch_size = 16
[models."a@1"]
target = "one.py:M"
[models."a@2"]
target = "two.py:M"
max_batch_size = 64
gpu_timeout_ms = 500
[models.b]
target = "b.py:f"
"""


def test_versions_of_a_model_have_workers_of_their_own_and_the_model_all_else(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(VERSIONED)
    settings = load({"model_version": "7"}, {}, path)
    assert list(settings.served) == ["a", "b"]
    assert list(settings.runs) == ["a@1", "a@2", "b"]
    whole, one, two = settings.served["a"], settings.runs["a@1"], settings.runs["a@2"]
    assert [(each.model, each.model_version) for each in (one, two)] == [("a", "1"), ("a", "2")]
    assert [each.version_weights for each in (whole, one, two)] == ["1=9,2=1"] * 3
    assert [each.max_batch_size for each in (whole, one, two)] == [64, 16, 64], "the queue has room for the largest"
    assert [each.gpu_timeout_ms for each in (whole, one, two)] == [3000.0, 3000.0, 500.0]
    assert settings.runs["b"] is settings.served["b"]


def test_targets_name_versions_or_a_model_with_all_of_its_versions(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(VERSIONED)

    def chosen(*targets: str) -> dict[str, str]:
        models = load({}, {}, path, targets=targets).models
        return {f"{one.name}@{each.name}": each.target for one in models for each in one.versions}

    assert chosen("a") == {"a@1": "one.py:M", "a@2": "two.py:M"} == chosen("b", "a")
    assert chosen("a@2") == {"a@2": "two.py:M"}
    for targets in (("a", "a@1=new.py:M"), ("a@1=new.py:M", "a")):
        assert chosen(*targets) == {"a@1": "new.py:M", "a@2": "two.py:M"}, "what is given with its target goes first"
    assert chosen("a@2", "a@3=three.py:M") == {"a@2": "two.py:M", "a@3": "three.py:M"}
    assert load({}, {}, path, targets=["a@3=three.py:M"]).runs["a@3"].max_batch_size == 16, "as the model has it"
    assert [*load({}, {}, targets={"m@1": None, "m@2": None}).runs] == ["m@1", "m@2"]
    with pytest.raises(SettingError, match="is given both with and without a version"):
        load({}, {}, targets={"m@1": None, "m": None})


@pytest.mark.parametrize("setting", [{"models_per_gpu": 2}, {"autoscale": "local"}])
def test_what_goes_by_models_is_not_for_versions(setting: dict[str, Any]) -> None:
    versions = ModelSettings("1"), ModelSettings("2")
    with pytest.raises(
        SettingError, match="does not work with several versions of a model in one process, such as a@1"
    ):
        Settings(models=(ModelSettings("a", versions=versions),), **setting)


def test_weights_have_an_effect_where_versions_are_named() -> None:
    named = (ModelSettings("a", versions=(ModelSettings("1"),)),)
    assert idle(Settings(version_weights="1=1")) == [("version_weights", "broker")]
    assert idle(Settings(version_weights="1=1", models=named)) == []


@pytest.mark.parametrize("targets", [["a.py:f", "b.py:g"], ["a=x.py:f", "a=y.py:f"], ["a=x.py:f", "y.py:f"]])
def test_several_targets_need_a_name_each(targets: list[str]) -> None:
    with pytest.raises(SettingError, match="TARGET"):
        load({}, {}, targets=targets)
    for name in ("a@", "a@1@2"):
        with pytest.raises(SettingError, match=f"model '{name}' = .* must be 1 to 128 letters"):
            load({}, {}, targets=[f"{name}=m.py:f"])


def test_a_secret_of_a_model_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text('[models.a]\ntarget = "https://host/?key=s3cret"\nremote_token = "s3cret"\n')
    assert "s3cret" not in repr(load({}, {}, path))
