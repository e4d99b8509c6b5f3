"""Templates of chats: messages to one text, and what cannot be a template."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from headway.config import Settings
from headway.errors import BadRequest, SettingError
from headway.http.openai.chat import load_template
from tests.http.stand import Stand, post, served

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
CHATML = """\
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def template(folder: Path, source: str) -> str:
    pytest.importorskip("jinja2", reason="Jinja comes with the extra chat")
    path = folder / "template.jinja"
    path.write_text(source)
    return str(path)


def test_plain_writes_a_line_for_each_message() -> None:
    assert load_template("plain")(MESSAGES) == "system: be brief\nuser: hello\nassistant:"


def test_a_template_as_models_have_it_is_rendered(tmp_path: Path) -> None:
    render = load_template(template(tmp_path, CHATML))
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert render(MESSAGES) == expected
    with pytest.raises(BadRequest, match=r"unknown role tool - at `\$.messages`"):
        render([{"role": "tool", "content": "x"}])


def test_a_template_has_what_models_use(tmp_path: Path) -> None:
    source = """{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}
{% if tools %}{{ tools }}{% endif %}{{ strftime_now('%Y') | length }}"""
    assert load_template(template(tmp_path, source))(MESSAGES) == json.dumps(MESSAGES[0]) + "4"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
        "{{ range(1000000) | list }}",
        "{{ nowhere.x }}",
    ],
)
def test_a_template_reaches_nothing_but_the_messages(tmp_path: Path, source: str) -> None:
    messages = [dict(one) for one in MESSAGES]
    render = load_template(template(tmp_path, source))
    with pytest.raises(BadRequest):
        render(messages)
    assert messages == MESSAGES


def test_what_is_no_template_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="no such file"):
        Settings(chat_template="nowhere.jinja")
    with pytest.raises(SettingError, match="cannot be read"):
        load_template(str(tmp_path))
    path = tmp_path / "template.jinja"
    path.write_text("{% for")
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "jinja2":
            raise ImportError(name)
        return real(name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        with pytest.raises(SettingError, match=r"pip install 'jinja2"):
            load_template(str(path))
    with pytest.raises(SettingError, match="not a Jinja template"):
        load_template(template(tmp_path, "{% for"))
    with pytest.raises(SettingError, match=r"unknown tag 'frob'\. Fix the file\.$"):
        load_template(template(tmp_path, "{% frob %}"))


def test_a_chat_is_rendered_by_the_template_that_is_set(tmp_path: Path) -> None:
    async def main(stand: Stand) -> None:
        answer = await stand.ask(post(json.dumps({"messages": MESSAGES}), "/v1/chat/completions"))
        assert answer.json["choices"][0]["message"]["content"].startswith("<|IM_START|>SYSTEM\n")
        wrong = await stand.ask(post('{"messages": [{"role": "x", "content": "a"}]}', "/v1/chat/completions"))
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "messages")

    served(main, chat_template=template(tmp_path, CHATML))
