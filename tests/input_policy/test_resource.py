"""The input policy as a part of its process: what stops a start, and what a second reading does."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.app import input_policy
from headway.app.input_policy import PolicyResource
from headway.config import Settings
from headway.errors import SettingError, TargetError
from headway.gateway.served_models import ServedModels
from headway.input_policy import file as policy_file
from headway.model import InferenceRequest, Principal, RequestOptions
from headway.runtime.counters import Counters

WORDS = '[[rules]]\nname = "words"\npatterns = ["evil"]\n'
FUNCTION = '[[rules]]\nname = "judge"\nfunction = "{}"\n'


def resource(folder: Path, text: str) -> PolicyResource:
    path = folder / "policy.toml"
    path.write_text(text, encoding="utf-8")
    counters = Counters()
    return PolicyResource(
        Settings(input_policy=str(path)), ["default"], counters.input_policy, counters.worker.restarts
    )


def refused(policy: PolicyResource, text: str) -> bool:
    ann = Principal("ann", "acme", 1)
    request = InferenceRequest(ann, "id", RequestOptions(1.0), "default", text)
    found = policy.gate.inspect(("acme", "ann"), request, ServedModels(["default"]), lambda waited, failure: None)
    return found.failure is not None


def test_a_missing_package_is_named_with_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object) -> None:
        raise ModuleNotFoundError("No module named 're2'", name="re2")

    monkeypatch.setattr(policy_file, "_searches", missing)
    with pytest.raises(SettingError, match="google-re2, which is not installed") as told:
        resource(tmp_path, WORDS)
    assert told.value.hint == "Run pip install 'google-re2>=1.1.20251105,<2'."


@pytest.mark.parametrize(
    ("function", "reason"),
    [("http://localhost/", "is not a Python function"), ("nothing", "cannot be used: TARGET 'nothing'")],
)
def test_what_is_no_function_of_python_is_refused_with_its_rule(tmp_path: Path, function: str, reason: str) -> None:
    with pytest.raises(SettingError) as told:
        resource(tmp_path, FUNCTION.format(function))
    assert told.value.setting == f"{tmp_path / 'policy.toml'}: rule judge: function"
    assert told.value.value == function
    assert told.value.reason.startswith(reason)


def test_a_function_whose_own_words_end_in_a_question_is_refused_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asks(*arguments: object) -> None:
        raise TargetError("why me?")

    monkeypatch.setattr(input_policy, "parse_target", asks)
    with pytest.raises(SettingError, match=r"cannot be used: why me\?"):
        resource(tmp_path, FUNCTION.format("any:function"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "reason"), [("no", "has no 'no'"), ("unannotated", "returned bool for this input, expected str")]
)
async def test_a_function_that_does_not_judge_a_first_text_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    policy = resource(tmp_path, FUNCTION.format(f"tests.targets.guard:{name}"))
    with pytest.raises(SettingError, match=reason) as told:
        await policy.open()
    assert "-> list[bool]" in told.value.hint
    await policy.close()


@pytest.mark.processes
async def test_a_function_that_is_misspelt_is_told_what_is_meant(tmp_path: Path) -> None:
    policy = resource(tmp_path, FUNCTION.format("tests.targets.guard:unanotated"))
    with pytest.raises(SettingError, match=r"has no 'unanotated'\. Did you mean 'unannotated'\?$"):
        await policy.open()
    await policy.close()


async def test_a_second_reading_puts_new_rules_in_force_and_a_bad_file_keeps_the_old_ones(tmp_path: Path) -> None:
    policy = resource(tmp_path, WORDS)
    await policy.open()
    assert refused(policy, "evil")
    (tmp_path / "policy.toml").write_text(WORDS.replace("evil", "(evil"))
    with pytest.raises(SettingError, match="is no pattern"):
        await policy.reread()
    assert refused(policy, "evil")
    (tmp_path / "policy.toml").write_text(WORDS.replace("evil", "wicked"))
    await policy.reread()
    assert not refused(policy, "evil")
    assert refused(policy, "wicked")
    await policy.close()
