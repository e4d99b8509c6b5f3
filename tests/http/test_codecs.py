import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.config import Settings
from headway.doors.bodies import read_text
from headway.errors import HOPELESS, SHOWN, STATUS, TITLE, BadRequest, SettingError
from headway.http.inference.routes import codecs
from headway.http.openai.chat import load_template
from headway.http.problem import encode_problem, problem, problem_body, problem_header
from headway.model import Failure, TokenCount
from tests.http.stand import Stand, post, served

CODECS = INFERENCE, PLAIN, PREDICT = [
    codecs(Settings())[path] for path in ("/v1/inference", "/api/inference", "/v1/predict")
]
INPUTS = [(INFERENCE, "input"), (PLAIN, "input"), (PREDICT, "input_data")]
"""Each codec with the name of its input member."""


def test_bodies_of_all_three_shapes_are_read() -> None:
    body = b'{"input": "a", "model": "m", "parameters": {"k": [1, 2]}, "client_id": "me", "more": [{}]}'
    assert INFERENCE.read(body) == ("m", "a", b'{"k": [1, 2]}')
    assert PLAIN.read(b'{"input": "a", "model": 3, "parameters": {"k": 1}}') == (None, "a", b'{"k": 1}')
    assert PREDICT.read(b'{"model_id": "m", "input_data": "a", "parameters": {"k": 1}}') == ("m", "a", b'{"k": 1}')
    assert PREDICT.read(b'{"model_id": "m", "input_data": "a", "input": 3}') == ("m", "a", b"")
    for parameters in (b"", b', "parameters": null', b', "parameters": {}'):
        assert INFERENCE.read(b'{"input": ""' + parameters + b"}") == (None, "", b"")
    with pytest.raises(BadRequest, match="model_id"):
        PREDICT.read(b'{"input_data": "a"}')
    with pytest.raises(BadRequest, match=r"\$.input_data"):
        PREDICT.read(b'{"model_id": "m", "input_data": 1}')


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"{", "not JSON"),
        (b'{"input": "a"} x', "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        ('{"input": "a"}'.encode("utf-16"), "not UTF-8"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `input`"),
        (b'{"input": 3}', "Expected `str`, got `int` - at `$.input`"),
        (b'{"input": ["a"]}', "got `array` - at `$.input`; send several inputs as `inputs` to /v1/inference"),
        (
            b"{'input': 'a'}",
            "not JSON: object keys must be strings (byte 1); in JSON, names and strings are in double quotes",
        ),
        (b"'{input:", "not JSON: invalid character (byte 0); in JSON, names and strings are in double quotes"),
        (b'{"input": "a", "model": 3}', "Expected `str | null`, got `int` - at `$.model`"),
        (b'{"input": "a", "client_id": {}}', "`$.client_id`"),
        (b'{"input": "a", "parameters": []}', "`$.parameters`"),
        (b'{"input": "a", "parameters": {"x": 1e999}}', "out of range"),
        (b'{"input": "a", "parameters": {"x": ' + b"9" * 5000 + b"}}", "out of range"),
        (b'{"input": "a", "parameters": {"x": "\xff"}}', "not UTF-8"),
        (b'{"input": "a", "parameters": {"x": "\\ud800"}}', "surrogate"),
        (b'{"input": "a", "parameters": ' + b'{"x":' * 33 + b"1" + b"}" * 33 + b"}", "deeper than 32"),
        (b'{"input": "a", "parameters": {"x": ' + b"[" * 32 + b"]" * 32 + b"}}", "deeper than 32"),
        (b'{"input": "a", "parameters": ' + b'{"x":' * 100_000 + b"}" * 100_000 + b"}", "too deeply"),
        (b'{"input": "a", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deeply"),
        (b"[" * 100_000, "Expected `object`"),
        (b'{"input": "\xff"}', "not UTF-8: invalid start byte at byte 11"),
        (b'{"input": "a", "more": "\xff"}', "not UTF-8"),
        (b'{"input": "\\ud800"}', "lone surrogate"),
        (b'{"input": "\\u0000"}', "U+0000"),
        (b'{"input": "\x01"}', "not JSON"),
    ],
)
def test_says_what_is_wrong_with_a_body(body: bytes, says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        INFERENCE.read(body)
    assert says in caught.value.message


def test_parameters_may_be_as_deep_and_as_many_as_told() -> None:
    deep = b'{"x":' * 32 + b"1" + b"}" * 32
    wide = b'{"x":[' + b"{}," * 100 + b"{}]}"
    assert INFERENCE.read(b'{"input": "a", "parameters": ' + deep + b"}") == (None, "a", deep)
    assert INFERENCE.read(b'{"input": "a", "parameters": ' + wide + b"}") == (None, "a", wide)

    def body(count: int) -> bytes:
        return json.dumps({"input": "a", "parameters": {str(number): number for number in range(count)}}).encode()

    assert len(json.loads(INFERENCE.read(body(64))[2])) == 64
    with pytest.raises(BadRequest, match="65 members; at most 64 are allowed"):
        INFERENCE.read(body(65))


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])), st.booleans())
def test_any_text_is_read_and_written_unchanged(text: str, escaped: bool) -> None:
    for codec, member in INPUTS:
        body = json.dumps({"model_id": "m", member: text}, ensure_ascii=escaped).encode()
        assert codec.read(body)[1] == read_text(text.encode()) == text
        assert json.loads(codec.write("req_1", text, 1.5, "v", None))["output"] == text


def test_answers_of_all_three_shapes_are_written() -> None:
    for tokens, used in ((None, None), (TokenCount(7, 3), 7)):
        metadata = {"tokens_used": used, "latency_ms": 1.5, "model_version": "7"}
        shapes: list[dict[str, object]] = [{"metadata": metadata}, {"latency_ms": 1.5}, {"latency_ms": 1.5}]
        for codec, more in zip(CODECS, shapes, strict=True):
            written = json.loads(codec.write("req_1", "A", 1.5, "7", tokens))
            assert written == {"request_id": "req_1", "output": "A", **more}


@pytest.mark.parametrize("code", STATUS)
def test_a_problem_says_everything_twice(code: str) -> None:
    document, busy = json.loads(problem_body(problem(Failure(code, "why"), "req_1"))), STATUS[code] in (429, 503)
    about = {"type": f"/docs#{code.lower().replace('_', '-')}", "title": TITLE[code], "status": STATUS[code]}
    said = {"detail": "why", "error": SHOWN.get(code, code), "message": "why", "request_id": "req_1"}
    assert document == {**about, **said, **({"retry_after_ms": 1000} if busy else {})}
    header = problem_header(Failure(code, "why"))
    assert ("retry-after" in header, "x-should-retry" in header) == (busy, code in HOPELESS)
    assert not (code in HOPELESS and STATUS[code] in (429, 500, 502, 503, 504))


def test_retry_after_is_rounded_up() -> None:
    for seconds, whole, milliseconds in (
        (0.0, "1", "0"),
        (0.25, "1", "250"),
        (1.0, "1", "1000"),
        (2.0004, "3", "2001"),
    ):
        header = problem_header(Failure("SHED", "why", seconds, "queue"))
        assert (header["retry-after"], header["retry-after-ms"]) == (whole, milliseconds)
        assert header["x-headway-dropped-reason"] == "queue"


def test_a_reason_that_could_break_the_header_is_left_out_and_a_message_is_escaped() -> None:
    assert "x-headway-dropped-reason" not in problem_header(Failure("SHED", "why", 1.0, "a\r\nx: y"))
    _, body = encode_problem(Failure("REJECTED_BY_MODEL", "bad \ud800"), "req_1")
    assert json.loads(body)["message"] == "bad \\ud800"


def test_of_a_member_that_is_there_twice_the_last_counts_and_unknown_ones_are_skipped() -> None:
    body = b'{"input": 1, "input": "a", "parameters": {"x": 1, "x": 2}, "parameters": {"y": 1, "y": 2}, "input": "b"}'
    with pytest.raises(BadRequest, match=r"`\$.input`"):
        INFERENCE.read(body)
    model, text, parameters = INFERENCE.read(body.replace(b'"input": 1, ', b""))
    assert (model, text) == (None, "b")
    assert json.loads(parameters) == {"y": 2}
    body = b'{"input": "a"' + b"".join(b',"%d":[{}]' % number for number in range(50_000)) + b"}"
    assert INFERENCE.read(body) == (None, "a", b"")


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


def test_a_template_as_models_have_it_is_rendered_with_what_they_use(tmp_path: Path) -> None:
    render = load_template(template(tmp_path, CHATML))
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert render(MESSAGES) == expected
    with pytest.raises(BadRequest, match=r"unknown role tool - at `\$.messages`"):
        render([{"role": "tool", "content": "x"}])
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
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jinja2", None)
        with pytest.raises(SettingError, match=r"pip install 'jinja2"):
            load_template(str(path))
    with pytest.raises(SettingError, match="not a Jinja template"):
        load_template(template(tmp_path, "{% for"))
    with pytest.raises(SettingError, match=r"unknown tag 'frob'\. Fix the file\.$"):
        load_template(template(tmp_path, "{% frob %}"))
    with pytest.raises(SettingError, match=r"'break' outside loop\. Fix the file\.$"):
        load_template(template(tmp_path, "{% for m in messages %}{% macro x() %}{% break %}{% endmacro %}{% endfor %}"))


def test_a_chat_is_rendered_by_the_template_that_is_set(tmp_path: Path) -> None:
    async def main(stand: Stand) -> None:
        answer = await stand.ask(post(json.dumps({"messages": MESSAGES}), "/v1/chat/completions"))
        assert answer.json["choices"][0]["message"]["content"].startswith("<|IM_START|>SYSTEM\n")
        wrong = await stand.ask(post('{"messages": [{"role": "x", "content": "a"}]}', "/v1/chat/completions"))
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "messages")

    served(main, chat_template=template(tmp_path, CHATML))
