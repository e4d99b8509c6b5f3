"""Bodies of inference requests: what decodes and checks them, for every codec, and says what is wrong with one.

A body is decoded once; whatever is wrong with it becomes a BadRequest that names the member and what was expected of
it. Of a member that is there twice the last one counts, here and in the workers alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headway.config import Settings
from headway.core import values
from headway.core.excerpt import excerpt
from headway.core.json_pages import PAGE, SHORT, Pages, Steps, TooDeep, members, split
from headway.core.likeness import nearest
from headway.errors import BadRequest, PayloadTooLarge
from headway.gateway.fan_out import MOST_INPUTS
from headway.model import Value

_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_LONE = r"the body contains a lone surrogate (\ud800 to \udfff without its other half), which is no text"
_MISSING = re.compile("Object missing required field `(input|input_data|model_id)`")
_SEVERAL = re.compile(r"Expected `str`, got `array` - at `\$\.(?:input|input_data)`")
_SINGLE_QUOTED = re.compile(rb"\s*(?:[{\[]\s*)*'")
"""Beginning of a body in Python's own form, or of one in quotes that its shell has left there."""
_MOST_BYTES = 1 << 16
"""Bytes of the longest body that is looked into."""
_MALFORMED = "JSON is malformed: "
_MOST_SHOWN = 5
_TOGETHER = 32
"""Inputs of a long list that are read between two yields."""
_ELSEWHERE = {
    "instances": "several inputs go as `inputs` to /v1/inference",
    "inputs": "several inputs go to /v1/inference",
    "prompt": "prompts go to /v1/completions",
    "messages": "chats go to /v1/chat/completions",
    "input": "/v1/inference takes an `input`",
    "input_data": "/v1/predict takes an `input_data`",
}
"""Members of the bodies of other routes and APIs, with where they go."""
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class OtherInput(BadRequest):
    """The body may be good, but not for a model that takes texts; its message says why."""


MAX_DEPTH = 32
"""Deepest nesting of `parameters`, as a worker must be able to decode whatever was accepted."""

MOST_MEMBERS = 1024
"""Most members of a long body."""

ABSENT = msgspec.Raw()
"""Value of `parameters` where a body has none."""

_NO_INPUT = "Object missing required field `input`"
_NUL = "the input contains U+0000, which not every model can hold; remove it"


def body_reader(kind: type[Any], settings: Settings) -> Callable[[bytes], tuple[str | None, str, bytes]]:
    """Make the function that reads JSON bodies into (model or None, input, parameters); see `Codec.read`.

    Arguments:
        kind: msgspec Struct of a body, with `model`, `input` and `parameters`, the last as Raw.
        settings: bounds of inputs and parameters.
    """
    decode, most_parameters = msgspec.json.Decoder(kind).decode, settings.max_parameters

    def read(body: bytes) -> tuple[str | None, str, bytes]:
        try:
            if not body.isascii():
                body.decode()
            asked = decode(body)
            raw = asked.parameters
            parameters = b"" if raw is ABSENT else checked_parameters(raw, most_parameters)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            kind = OtherInput if isinstance(exc, msgspec.ValidationError) else BadRequest
            raise kind(why_not(exc, body)) from None
        text = asked.input
        if "\x00" in text:
            raise BadRequest(_NUL)
        return asked.model, text, parameters

    return read


Asked = tuple[str | None, Value | list[Value], bytes, str]
"""Model or None, one input or a list of several, parameters, and the version that is asked for or empty."""


def value_reader(kind: type[Any], settings: Settings) -> Callable[[bytes], Asked]:
    """Make the function that reads JSON bodies with an input that is any JSON value, or with several; see `Codec.read_value`.

    Arguments:
        kind: msgspec Struct of a body, with `model`, `input`, `inputs`, `parameters`, `version` and `model_version`; the second to the
            fourth are Raw, and ABSENT where a body has none. What a route does not take is a ClassVar.
        settings: bounds of inputs and parameters.
    """
    most = min(MOST_INPUTS, settings.max_queue)
    decode, most_parameters = msgspec.json.Decoder(kind).decode, settings.max_parameters

    def read(body: bytes) -> Asked:
        try:
            if not body.isascii():
                body.decode()
            asked = decode(body)
            parameters = b"" if asked.parameters is ABSENT else checked_parameters(asked.parameters, most_parameters)
            if asked.inputs is not ABSENT:
                if asked.input is not ABSENT:
                    raise BadRequest("the body has both `input` and `inputs`; expected one of them")
                return asked.model, _several(asked.inputs, most), parameters, _version(asked)
            if asked.input is ABSENT:
                raise BadRequest(_NO_INPUT + meant(_NO_INPUT, body))
            value = values.read(bytes(asked.input))
            version = _version(asked)
        except values.NoValue as exc:
            raise BadRequest(f"the input {exc}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(why_not(exc, body)) from None
        return asked.model, value, parameters, version

    return read


def long_value_reader(kind: type[Any], settings: Settings) -> Callable[[bytes], Steps[Asked]]:
    """Make the function that reads long bodies as `value_reader`'s does, in steps."""
    most, most_parameters = min(MOST_INPUTS, settings.max_queue), settings.max_parameters
    take = struct_reader(kind, ("input", "inputs", "parameters"))

    def read(body: bytes) -> Steps[Asked]:
        asked = take((yield from members_in_steps(body)))
        parameters = b""
        if asked.parameters is not ABSENT:
            text = bytes(asked.parameters)
            parameters = text if (yield from parameters_in_steps(text, most_parameters)) else b""
        if asked.inputs is not ABSENT and asked.input is not ABSENT:
            raise BadRequest("the body has both `input` and `inputs`; expected one of them")
        if asked.inputs is ABSENT and asked.input is ABSENT:
            raise BadRequest(_NO_INPUT + meant(_NO_INPUT, body))
        if asked.inputs is ABSENT:
            input = yield from _long_value(bytes(asked.input), "the input")
            return asked.model, input, parameters, _version(asked)
        inputs: list[Value] = []
        for text in (yield from _several_in_steps(bytes(asked.inputs), most)):
            inputs.append((yield from _long_value(text, f"`$.inputs[{len(inputs)}]`")))
            if len(inputs) % _TOGETHER == 0:
                yield 0
        return asked.model, inputs, parameters, _version(asked)

    return read


def _long_value(text: bytes, name: str) -> Steps[Value]:
    """Value of a member that may be long. `name`: what messages call it."""
    try:
        return (yield from values.read_in_steps(text, known=True))
    except values.NoValue as exc:
        raise BadRequest(f"{name} {exc}") from None


def members_in_steps(body: bytes) -> Steps[dict[str, bytes]]:
    """Members of a long body, a JSON object, all of which is checked. Raises BadRequest."""
    text = bytes(body).strip(b" \t\r\n")  # A large one is a bytearray.
    try:
        if not text.isascii():
            text.decode()
        pages = Pages(text)
        for _ in pages:
            yield pages.size
    except TooDeep:
        raise BadRequest("the body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        lone = yield from _has_lone_surrogate(text)
        raise BadRequest(_LONE if lone else why_not(exc, b"0")) from None
    if text[:1] != b"{":
        raise BadRequest(f"Expected `object`, got `{values.name_of(values.of_json(text))}`")
    yield 0
    found = yield from members(text, MOST_MEMBERS)
    yield 0
    if found is None:
        raise BadRequest(f"the body has more than {MOST_MEMBERS} members, which are the most of one; send fewer")
    return found


def _has_lone_surrogate(text: bytes) -> Steps[bool]:
    for begin in range(0, len(text), PAGE):
        found = _LONE_SURROGATE.search(
            text, begin, begin + PAGE + 12
        )  # The other half of a pair may be behind the page.
        if found is not None and found.start() < begin + PAGE:
            return True
        yield 0
    return False


def struct_reader(kind: type[Any], raw: Sequence[str]) -> Callable[[Mapping[str, bytes]], Any]:
    """Make the function from the members of a long body to a struct, of which nothing long is decoded. It raises BadRequest.

    Arguments:
        kind: the struct.
        raw: its fields that are Raw, as far as it has them.
    """
    decode = msgspec.json.Decoder(kind).decode
    names = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    kept = [(field, names[field]) for field in raw if field in names]
    short = sorted(frozenset(names.values()) - {name for _, name in kept})

    def take(members: Mapping[str, bytes]) -> Any:
        given = [b'"%b":%b' % (name.encode(), members[name]) for name in short if name in members]
        given += [b'"%b":0' % name.encode() for _, name in kept if name in members]
        text = b"{%b}" % b",".join(given)
        try:
            found = decode(text)
        except msgspec.MsgspecError as exc:
            raise BadRequest(why_not(exc, text)) from None
        for field, name in kept:
            if name in members:
                setattr(found, field, msgspec.Raw(members[name]))
        return found

    return take


def parameters_in_steps(text: bytes, most: int) -> Steps[dict[str, msgspec.Raw]]:
    """Long parameters of a request, as `parameter_members` has them, of valid JSON. Raises BadRequest."""
    if len(text) <= SHORT:
        return parameter_members(text, most)
    if text[:1] != b"{":
        raise BadRequest("Expected `object | null` - at `$.parameters`")
    found = yield from members(text, most)
    if found is None:
        raise BadRequest(f"`$.parameters` has more than {most} members; at most {most} are taken")
    yield 0
    try:
        extreme = yield from values.check_in_steps(text, MAX_DEPTH)
    except values.NoValue as exc:
        raise BadRequest(f"`$.parameters` {exc}") from None
    if extreme > values.MOST_EXTREME:
        raise BadRequest(f"`$.parameters` holds more than {values.MOST_EXTREME} numbers that may be out of range")
    return {name: msgspec.Raw(value) for name, value in found.items()}


def _version(asked: Any) -> str:
    """Version that a body asks for, by either name that it may have; empty: any."""
    version, named = asked.version, asked.model_version
    if "" in (version, named):
        raise BadRequest(
            f"Expected the name of a version, or none - at `$.{'version' if not version else 'model_version'}`"
        )
    if version and named and version != named:
        raise BadRequest("the body has both `version` and `model_version`, which differ; expected one of them")
    return version or named or ""


def _several(raw: msgspec.Raw, most: int) -> list[Value]:
    """Values of a JSON array, at most `most`."""
    text = bytes(raw)
    if text[:1] != b"[":
        raise BadRequest(f"Expected `array`, got `{values.name_of(values.read(text))}` - at `$.inputs`")
    elements = _texts(text) or _decode_elements(text)
    if not elements:
        raise BadRequest("Expected `array` of at least one input - at `$.inputs`")
    if len(elements) > most:
        raise PayloadTooLarge(f"`$.inputs` has more than {most} members, which are the most in one request")
    if type(elements[0]) is str:
        return elements
    found: list[Value] = []
    for element in elements:
        try:
            found.append(values.read(bytes(element)))
        except values.NoValue as exc:
            raise BadRequest(f"`$.inputs[{len(found)}]` {exc}") from None
    return found


def _texts(text: bytes) -> list[Any]:
    """Elements of a JSON array that are good texts, all of them; empty where something else is among them."""
    try:
        found: list[str] = _decode_texts(text)
    except msgspec.MsgspecError:
        return []
    return [] if "\x00" in "".join(found) else found


def _several_in_steps(text: bytes, most: int) -> Steps[list[bytes]]:
    """Elements of a long JSON array, at least one and at most `most`."""
    if text[:1] != b"[":
        raise BadRequest(f"Expected `array`, got `{values.name_of(values.of_json(text))}` - at `$.inputs`")
    found = yield from split(text, most)
    if found is None:
        raise PayloadTooLarge(f"`$.inputs` has more than {most} members, which are the most in one request")
    if not found:
        raise BadRequest("Expected `array` of at least one input - at `$.inputs`")
    return found


_decode_elements: Any = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode


def read_text(body: bytes) -> str:
    """Read a body that is the input itself. Raises BadRequest."""
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        raise BadRequest(why_not(exc, body)) from None
    return check_text(text)


def check_text(text: str) -> str:
    """Return an input that may hold any character but U+0000. Raises BadRequest."""
    if "\x00" in text:
        raise BadRequest(_NUL)
    return text


def checked_parameters(raw: msgspec.Raw, most: int) -> bytes:
    """Text of `parameters`, empty for none, if a worker can read it and it has at most `most` members. Raises BadRequest."""
    text = bytes(raw)
    return text if parameter_members(text, most) else b""


def parameter_members(text: bytes, most: int) -> dict[str, msgspec.Raw]:
    """Parameters of a request, of which there may be `most`; none where they are null. None of them is built.

    Raises:
        BadRequest: they are no object, too many, nested too deeply, or not what a worker can read.
        msgspec.MsgspecError: they are no valid JSON.
    """
    if text == b"null":
        return {}
    if text[:1] != b"{":
        raise BadRequest("Expected `object | null` - at `$.parameters`")
    try:
        members = values.read_members(text, MAX_DEPTH)
    except values.NoValue as exc:
        raise BadRequest(f"`$.parameters` {exc}") from None
    if len(members) > most:
        raise BadRequest(f"`$.parameters` has {len(members)} members; at most {most} are taken")
    return members


def why_not(exc: Exception, body: bytes) -> str:
    """Reason why a body, or a part of one, cannot be decoded, as its client may read it."""
    if isinstance(exc, UnicodeDecodeError):
        return f"the body is not UTF-8: {exc.reason} at byte {exc.start}"
    if isinstance(exc, RecursionError):
        return "the body is nested too deeply"
    if isinstance(exc, msgspec.ValidationError):
        return (problem := str(exc)) + meant(problem, body)
    if not body:
        return "the body is empty; expected a JSON object"
    if _LONE_SURROGATE.search(body):
        return _LONE
    quotes = (
        "; JSON has double quotes around names and texts, and no single ones"
        if _SINGLE_QUOTED.match(body[:100])
        else ""
    )
    return f"the body is not JSON: {str(exc).removeprefix(_MALFORMED)}{quotes}"


def meant(problem: str, body: bytes) -> str:
    """Words to add to the message about a body that lacks a member, or has several inputs in one; empty where nothing can be said.

    Arguments:
        problem: the message.
        body: the body.
    """
    if _SEVERAL.fullmatch(problem):
        return f"; {_ELSEWHERE['instances']}"
    if (missing := _MISSING.fullmatch(problem)) is None or len(body) > _MOST_BYTES:
        return ""
    try:
        names = list(_members(body))
    except msgspec.MsgspecError:
        return ""
    lower = {name.lower(): name for name in names}
    if near := nearest(missing[1], lower, 1, 0.8):
        return f"; did you mean it by `{excerpt(lower[near[0]])}`?"
    if found := next((what for name, what in _ELSEWHERE.items() if name in lower), ""):
        return f"; {found}"
    shown = ", ".join(f"`{excerpt(name)}`" for name in names[:_MOST_SHOWN])
    more = ", …" if len(names) > _MOST_SHOWN else ""
    return f"; it has {shown}{more}" if names else ""
