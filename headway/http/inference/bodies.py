"""Bodies of inference requests: what decodes and checks them, for every codec, and says what is wrong with one.

A body is decoded once; whatever is wrong with it becomes a BadRequest that names the member and what was expected of
it. Of a member that is there twice the last one counts, here and in the workers alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from headway.config import Settings
from headway.core import values
from headway.core.excerpt import excerpt
from headway.core.likeness import nearest
from headway.errors import BadRequest, PayloadTooLarge
from headway.gateway.fan_out import MOST_INPUTS
from headway.gateway.served_models import KnownModels
from headway.model import Octets, Value, ValueKind

_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_MISSING = re.compile("Object missing required field `(input|input_data|model_id)`")
_SEVERAL = re.compile(r"Expected `str`, got `array` - at `\$\.(?:input|input_data)`")
_SINGLE_QUOTED = re.compile(rb"\s*(?:[{\[]\s*)*'")
"""Beginning of a body in Python's own form, or of one in quotes that its shell has left there."""
_MOST_BYTES = 1 << 16
"""Bytes of the longest body that is looked into."""
_MALFORMED = "JSON is malformed: "
_MOST_SHOWN = 5
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

ABSENT = msgspec.Raw()
"""Value of `parameters` where a body has none."""

_NO_INPUT = "Object missing required field `input`"
_NUL = "the input contains U+0000, which not every model can hold; remove it"
_CONTROL = re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Control characters: C0 without tab, line feed and carriage return; DEL; C1. U+0000 is refused before."""

Check = Callable[[str], str]
"""Function that takes an input and returns what the model gets, or raises RequestError."""


def body_reader(kind: type[Any], settings: Settings) -> Callable[[bytes], tuple[str | None, str, bytes]]:
    """Make the function that reads JSON bodies into (model or None, input, parameters); see `Codec.read`.

    Arguments:
        kind: msgspec Struct of a body, with `model`, `input` and `parameters`, the last as Raw.
        settings: bounds of inputs and parameters.
    """
    decode, check, most_parameters = msgspec.json.Decoder(kind).decode, text_checker(settings), settings.max_parameters

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
        return asked.model, text if check is None else check(text), parameters

    return read


Asked = tuple[str | None, Value | list[Value], bytes, str]
"""Model or None, one input or a list of several, parameters, and the version that is asked for or empty."""


def value_reader(kind: type[Any], settings: Settings) -> Callable[..., Asked]:
    """Make the function that reads JSON bodies with an input that is any JSON value, or with several; see `Codec.read_value`.

    Arguments:
        kind: msgspec Struct of a body, with `model`, `input`, `inputs`, `parameters`, `version` and `model_version`; the second to the
            fourth are Raw, and ABSENT where a body has none. What a route does not take is a ClassVar.
        settings: bounds of inputs and parameters.
    """
    most = min(MOST_INPUTS, settings.max_queue)
    decode, check, most_parameters = (
        msgspec.json.Decoder(kind).decode,
        value_checker(settings),
        settings.max_parameters,
    )

    def read(body: bytes, known: KnownModels | None = None) -> Asked:
        try:
            if not body.isascii():
                body.decode()
            asked = decode(body)
            parameters = b"" if asked.parameters is ABSENT else checked_parameters(asked.parameters, most_parameters)
            if asked.inputs is not ABSENT:
                if asked.input is not ABSENT:
                    raise BadRequest("the body has both `input` and `inputs`; expected one of them")
                inputs = _several(asked.inputs, most)
                if check is not None and not _takes_tensors(asked.model, known):
                    inputs = list(map(check, inputs))
                return asked.model, inputs, parameters, _version(asked)
            if asked.input is ABSENT:
                raise BadRequest(_NO_INPUT + meant(_NO_INPUT, body))
            value = values.read(bytes(asked.input))
            version = _version(asked)
        except values.NoValue as exc:
            raise BadRequest(f"the input {exc}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(why_not(exc, body)) from None
        if check is not None and not _takes_tensors(asked.model, known):
            value = check(value)
        return asked.model, value, parameters, version

    return read


def _takes_tensors(model: str | None, known: KnownModels | None) -> bool:
    """Whether a model takes tensors, to which bounds of texts do not apply."""
    return known is not None and known[model or known.default].takes is ValueKind.TENSORS


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
    elements = (_decode_few if text.count(b",") < MOST_INPUTS else first_elements(msgspec.Raw))(text)
    if not elements:
        raise BadRequest("Expected `array` of at least one input - at `$.inputs`")
    if len(elements) > most:
        raise PayloadTooLarge(f"`$.inputs` has more than {most} members, which are the most in one request")
    found: list[Value] = []
    for element in elements:
        try:
            found.append(values.read(bytes(element)))
        except values.NoValue as exc:
            raise BadRequest(f"`$.inputs[{len(found)}]` {exc}") from None
    return found


_decode_few: Any = msgspec.json.Decoder(list[msgspec.Raw]).decode


@cache
def first_elements(kind: Any) -> Callable[[bytes], list[Any]]:
    """Decoder of the first elements of an array, one more than may be. The others are skipped, and nothing is made of them.

    Making it takes 10 ms, which only a process pays that is sent very many elements.
    """
    fields = [(f"e{number}", kind | msgspec.UnsetType, msgspec.UNSET) for number in range(MOST_INPUTS + 1)]
    decode = msgspec.json.Decoder(msgspec.defstruct("Elements", fields, array_like=True, gc=False)).decode
    return lambda text: [one for one in msgspec.structs.astuple(decode(text)) if one is not msgspec.UNSET]


def text_reader(settings: Settings) -> Callable[[bytes], str]:
    """Make the function that reads bodies that are the input itself."""
    check = text_checker(settings)

    def read(body: bytes) -> str:
        try:
            text = body.decode()
        except UnicodeDecodeError as exc:
            raise BadRequest(why_not(exc, body)) from None
        if "\x00" in text:
            raise BadRequest(_NUL)
        return text if check is None else check(text)

    return read


def input_checker(settings: Settings) -> Check:
    """Make the check of inputs that may hold any character."""
    check = text_checker(settings)

    def checked(text: str) -> str:
        if "\x00" in text:
            raise BadRequest(_NUL)
        return text if check is None else check(text)

    return checked


def text_checker(settings: Settings) -> Check | None:
    """Make the check of inputs without U+0000 under these settings; None for nothing to check."""
    most, policy = settings.max_input_chars, settings.control_chars
    if not most and policy == "keep":
        return None

    def check(text: str) -> str:
        if most and len(text) > most:
            raise PayloadTooLarge(f"the input has {len(text)} characters; at most {most} are taken (max_input_chars)")
        if policy == "keep" or text.isprintable():
            return text
        if policy == "strip":
            return _CONTROL.sub("", text)
        found = _CONTROL.search(text)
        if found is not None:
            where = f"U+{ord(found[0]):04X} at character {found.start()}"
            raise BadRequest(f"the input contains the control character {where}; remove it (control_chars)")
        return text

    return check


CheckValue = Callable[[Value], Value]
"""Function that takes any input and returns what the model gets, or raises RequestError."""


def value_checker(settings: Settings) -> CheckValue | None:
    """Make the check of inputs that are any JSON value, as `text_checker` does: each text in it is checked as an input would be."""
    check, most, keeps = text_checker(settings), settings.max_input_chars, settings.control_chars == "keep"
    if check is None:
        return None

    def check_value(value: Value) -> Value:
        if isinstance(value, str):
            return check(value)
        if isinstance(value, Octets):
            return value
        if most and (length := len(value.decode())) > most:
            raise PayloadTooLarge(f"the input has {length} characters; at most {most} are taken (max_input_chars)")
        if keeps:
            return value
        try:
            return msgspec.json.encode(_each_text(values.build(value), check))
        except msgspec.MsgspecError as exc:
            raise BadRequest(f"the input cannot be read: {exc}") from None

    return check_value


def _each_text(tree: object, check: Check) -> object:
    """A tree with each of its texts, names of members among them, as a check leaves it."""
    if isinstance(tree, str):
        return check(tree)
    if isinstance(tree, list):
        return [_each_text(one, check) for one in tree]
    if isinstance(tree, dict):
        return {check(name): _each_text(one, check) for name, one in tree.items()}
    return tree


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
        return r"the body contains a lone surrogate (\ud800 to \udfff without its other half), which is no text"
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
