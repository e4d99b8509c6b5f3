"""JSON bodies of inference requests: decoders and checks shared by all codecs, and error messages.

Each body is decoded once. An invalid body raises BadRequest; its message names the member and says what was expected. If a member
occurs more than once, the last one counts, as in the workers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headway.config import Settings
from headway.core import values
from headway.core.excerpt import excerpt, nearest
from headway.core.failures import error_of
from headway.core.json_pages import PAGE, SHORT, Pages, Steps, TooDeep, finish, members, split
from headway.core.tensor_json import tensors_in_steps
from headway.core.tensors import NoTensors
from headway.errors import BadRequest, PayloadTooLarge
from headway.gateway.fan_out import MOST_INPUTS
from headway.gateway.served_models import KnownModels
from headway.model import Tensors, Value

_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_LONE = r"the body contains a lone surrogate (\ud800 to \udfff without its other half), which is not text"
_MISSING = re.compile("Object missing required field `(input|input_data|model_id)`")
_SEVERAL = re.compile(r"Expected `str`, got `array` - at `\$\.(?:input|input_data)`")
_SINGLE_QUOTED = re.compile(rb"\s*(?:[{\[]\s*)*'")  # Start of a body with Python's or a shell's quotes.
_MOST_BYTES = 1 << 16  # Maximum size in bytes of a body for which an error message suggests a fix.
_MALFORMED = "JSON is malformed: "
_MOST_SHOWN = 5
_TOGETHER = 32  # Number of inputs of a long list to decode between two yields.
_ELSEWHERE = {  # Members that belong to other routes and APIs, each with advice.
    "instances": "send several inputs as `inputs` to /v1/inference",
    "inputs": "send several inputs to /v1/inference",
    "prompt": "send prompts to /v1/completions",
    "messages": "send chats to /v1/chat/completions",
    "input": "/v1/inference takes an `input`",
    "input_data": "/v1/predict takes an `input_data`",
}
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class OtherInput(BadRequest):
    """The body isn't valid for a model that takes text, but another kind of model may accept it."""


MAX_DEPTH = 32  # Maximum nesting depth of `parameters`. Workers can decode this depth.

MOST_MEMBERS = 1024

ABSENT = msgspec.Raw()  # Placeholder for a missing Raw member.

_NO_INPUT = "Object missing required field `input`"
_NUL = "the input contains U+0000, which not every model accepts; remove it"


def body_reader(kind: type[Any], settings: Settings) -> Callable[[bytes], tuple[str | None, str, bytes]]:
    """Return a function that decodes a JSON body into (model or None, input, parameters); see `Codec.read`. `kind` is a msgspec
    Struct with the fields `model`, `input`, and `parameters` (as Raw)."""
    decode, max_parameters = msgspec.json.Decoder(kind).decode, settings.max_parameters

    def read(body: bytes) -> tuple[str | None, str, bytes]:
        try:
            if not body.isascii():
                body.decode()
            parsed = decode(body)
            raw = parsed.parameters
            parameters = b"" if raw is ABSENT else checked_parameters(raw, max_parameters)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            kind = OtherInput if isinstance(exc, msgspec.ValidationError) else BadRequest
            raise kind(decode_problem(exc, body)) from None
        text = parsed.input
        if "\x00" in text:
            raise BadRequest(_NUL)
        return parsed.model, text, parameters

    return read


ParsedBody = tuple[str | None, Value | list[Value], bytes, str]  # Model or None, input or inputs, parameters, version.


def value_reader(kind: type[Any], settings: Settings) -> Callable[[bytes], ParsedBody]:
    """Return a function that decodes a JSON body with a single input of any JSON type, or with several; see `Codec.read_value`.
    `kind` is a msgspec Struct with `model`, `version`, `model_version`, `input`, `inputs` and `parameters`. The last three are
    Raw, and ABSENT by default. Members that the route doesn't accept are ClassVars."""
    limit = min(MOST_INPUTS, settings.max_queue)
    decode, max_parameters = msgspec.json.Decoder(kind).decode, settings.max_parameters

    def read(body: bytes) -> ParsedBody:
        try:
            if not body.isascii():
                body.decode()
            parsed = decode(body)
            parameters = b"" if parsed.parameters is ABSENT else checked_parameters(parsed.parameters, max_parameters)
            if parsed.inputs is not ABSENT:
                if parsed.input is not ABSENT:
                    raise BadRequest("the body has both `input` and `inputs`; send only one of them")
                return parsed.model, _several(parsed.inputs, limit), parameters, _version(parsed)
            if parsed.input is ABSENT:
                raise BadRequest(_NO_INPUT + suggestion(_NO_INPUT, body))
            value = values.read(bytes(parsed.input))
            version = _version(parsed)
        except values.NoValue as exc:
            raise BadRequest(f"the input {exc}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise BadRequest(decode_problem(exc, body)) from None
        return parsed.model, value, parameters, version

    return read


def long_value_reader(kind: type[Any], settings: Settings) -> Callable[[bytes], Steps[ParsedBody]]:
    """Return a function that decodes long bodies in steps; see `value_reader`."""
    limit, max_parameters = min(MOST_INPUTS, settings.max_queue), settings.max_parameters
    take = struct_reader(kind, ("input", "inputs", "parameters"))

    def read(body: bytes) -> Steps[ParsedBody]:
        parsed = take((yield from members_in_steps(body)))
        parameters = b""
        if parsed.parameters is not ABSENT:
            text = bytes(parsed.parameters)
            parameters = text if (yield from parameters_in_steps(text, max_parameters)) else b""
        if parsed.inputs is not ABSENT and parsed.input is not ABSENT:
            raise BadRequest("the body has both `input` and `inputs`; send only one of them")
        if parsed.inputs is ABSENT and parsed.input is ABSENT:
            raise BadRequest(_NO_INPUT + suggestion(_NO_INPUT, body))
        if parsed.inputs is ABSENT:
            input = yield from _long_value(bytes(parsed.input), "the input")
            return parsed.model, input, parameters, _version(parsed)
        inputs: list[Value] = []
        for text in (yield from _several_in_steps(bytes(parsed.inputs), limit)):
            inputs.append((yield from _long_value(text, f"`$.inputs[{len(inputs)}]`")))
            if len(inputs) % _TOGETHER == 0:
                yield 0
        return parsed.model, inputs, parameters, _version(parsed)

    return read


def _long_value(text: bytes, name: str) -> Steps[Value]:
    """Decode a member that may be long. Error messages call it `name`."""
    try:
        return (yield from values.read_in_steps(text, known=True))
    except values.NoValue as exc:
        raise BadRequest(f"{name} {exc}") from None


def members_in_steps(body: bytes) -> Steps[dict[str, bytes]]:
    """Validate a long body, and return its members. Raises BadRequest."""
    text = bytes(body).strip(b" \t\r\n")  # A large body is a bytearray.
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
        raise BadRequest(_LONE if lone else decode_problem(exc, b"0")) from None
    if text[:1] != b"{":
        raise BadRequest(f"Expected `object`, got `{values.name_of(values.of_json(text))}`")
    yield 0
    by_name = yield from members(text, MOST_MEMBERS)
    yield 0
    if by_name is None:
        raise BadRequest(f"the body has more than {MOST_MEMBERS} members; send fewer")
    return by_name


def _has_lone_surrogate(text: bytes) -> Steps[bool]:
    for begin in range(0, len(text), PAGE):
        # The other half of a pair may be on the next page.
        match = _LONE_SURROGATE.search(text, begin, begin + PAGE + 12)
        if match is not None and match.start() < begin + PAGE:
            return True
        yield 0
    return False


def struct_reader(kind: type[Any], raw: Sequence[str]) -> Callable[[Mapping[str, bytes]], Any]:
    """Return a function that makes a struct of type `kind` from a long body's members, or raises BadRequest. Members in `raw`
    stay undecoded."""
    decode = msgspec.json.Decoder(kind).decode
    names = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    undecoded = [(field, names[field]) for field in raw if field in names]
    short = sorted(frozenset(names.values()) - {name for _, name in undecoded})

    def take(members: Mapping[str, bytes]) -> Any:
        given = [b'"%b":%b' % (name.encode(), members[name]) for name in short if name in members]
        given += [b'"%b":0' % name.encode() for _, name in undecoded if name in members]
        text = b"{%b}" % b",".join(given)
        try:
            built = decode(text)
        except msgspec.MsgspecError as exc:
            raise BadRequest(decode_problem(exc, text)) from None
        for field, name in undecoded:
            if name in members:
                setattr(built, field, msgspec.Raw(members[name]))
        return built

    return take


def parameters_in_steps(text: bytes, limit: int) -> Steps[dict[str, msgspec.Raw]]:
    """Check and return long parameters in steps. Their text must be valid JSON. See `parameter_members`."""
    if len(text) <= SHORT:
        return parameter_members(text, limit)
    if text[:1] != b"{":
        raise BadRequest("Expected `object | null` - at `$.parameters`")
    by_name = yield from members(text, limit)
    if by_name is None:
        raise BadRequest(f"`$.parameters` has more than {limit} members; at most {limit} are allowed")
    yield 0
    try:
        extreme = yield from values.check_in_steps(text, MAX_DEPTH)
    except values.NoValue as exc:
        raise BadRequest(f"`$.parameters` {exc}") from None
    if extreme > values.MOST_EXTREME:
        raise BadRequest(f"`$.parameters` has more than {values.MOST_EXTREME} very large or very long numbers")
    return {name: msgspec.Raw(value) for name, value in by_name.items()}


def _version(parsed: Any) -> str:
    version, named = parsed.version, parsed.model_version
    if "" in (version, named):
        raise BadRequest(f"Expected a version or null - at `$.{'version' if not version else 'model_version'}`")
    if version and named and version != named:
        raise BadRequest("the body has both `version` and `model_version`, and they differ; send only one of them")
    return version or named or ""


def _several(raw: msgspec.Raw, limit: int) -> list[Value]:
    text = bytes(raw)
    if text[:1] != b"[":
        raise BadRequest(f"Expected `array`, got `{values.name_of(values.read(text))}` - at `$.inputs`")
    elements = _texts(text) or _decode_elements(text)
    if not elements:
        raise BadRequest("Expected `array` of at least one input - at `$.inputs`")
    if len(elements) > limit:
        raise PayloadTooLarge(f"`$.inputs` has more than {limit} members, the limit for one request")
    if type(elements[0]) is str:
        return elements
    inputs: list[Value] = []
    for element in elements:
        try:
            inputs.append(values.read(bytes(element)))
        except values.NoValue as exc:
            raise BadRequest(f"`$.inputs[{len(inputs)}]` {exc}") from None
    return inputs


def _texts(text: bytes) -> list[Any]:
    """Return the elements of a JSON array if all of them are valid strings, otherwise an empty list."""
    try:
        texts: list[str] = _decode_texts(text)
    except msgspec.MsgspecError:
        return []
    return [] if "\x00" in "".join(texts) else texts


def _several_in_steps(text: bytes, limit: int) -> Steps[list[bytes]]:
    if text[:1] != b"[":
        raise BadRequest(f"Expected `array`, got `{values.name_of(values.of_json(text))}` - at `$.inputs`")
    elements = yield from split(text, limit)
    if elements is None:
        raise PayloadTooLarge(f"`$.inputs` has more than {limit} members, the limit for one request")
    if not elements:
        raise BadRequest("Expected `array` of at least one input - at `$.inputs`")
    return elements


_decode_elements: Any = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode


def read_text(body: bytes) -> str:
    """Decode a body that is itself the input. Raises BadRequest."""
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        raise BadRequest(decode_problem(exc, body)) from None
    return check_text(text)


def check_text(text: str) -> str:
    """Return the text unchanged. Raises BadRequest if it contains U+0000."""
    if "\x00" in text:
        raise BadRequest(_NUL)
    return text


def checked_parameters(raw: msgspec.Raw, limit: int) -> bytes:
    """Return the JSON text of `parameters`, or b"" if it has no members. Raises as `parameter_members` does."""
    text = bytes(raw)
    return text if parameter_members(text, limit) else b""


def parameter_members(text: bytes, limit: int) -> dict[str, msgspec.Raw]:
    """Return a request's parameters, undecoded, or {} for null. Raises msgspec.MsgspecError if they aren't valid JSON. Raises
    BadRequest if they aren't an object, number more than `limit`, are nested too deeply, or can't be decoded by a worker."""
    if text == b"null":
        return {}
    if text[:1] != b"{":
        raise BadRequest("Expected `object | null` - at `$.parameters`")
    try:
        members = values.read_members(text, MAX_DEPTH)
    except values.NoValue as exc:
        raise BadRequest(f"`$.parameters` {exc}") from None
    if len(members) > limit:
        raise BadRequest(f"`$.parameters` has {len(members)} members; at most {limit} are allowed")
    return members


def decode_problem(exc: Exception, body: bytes) -> str:
    """Return the error message for a body, or a part of it, that can't be decoded."""
    if isinstance(exc, UnicodeDecodeError):
        return f"the body is not UTF-8: {exc.reason} at byte {exc.start}"
    if isinstance(exc, RecursionError):
        return "the body is nested too deeply"
    if isinstance(exc, msgspec.ValidationError):
        return (problem := str(exc)) + suggestion(problem, body)
    if not body:
        return "the body is empty; expected a JSON object"
    if _LONE_SURROGATE.search(body):
        return _LONE
    quotes = (
        "; in JSON, names and strings are in double quotes, not single ones" if _SINGLE_QUOTED.match(body[:100]) else ""
    )
    return f"the body is not JSON: {str(exc).removeprefix(_MALFORMED)}{quotes}"


def suggestion(problem: str, body: bytes) -> str:
    """Return a hint to append to the error message `problem`, or ""."""
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
        return f"; did you mean that by `{excerpt(lower[near[0]])}`?"
    if hint := next((hint for name, hint in _ELSEWHERE.items() if name in lower), ""):
        return f"; {hint}"
    shown = ", ".join(f"`{excerpt(name)}`" for name in names[:_MOST_SHOWN])
    more = ", …" if len(names) > _MOST_SHOWN else ""
    return f"; it has {shown}{more}" if names else ""


def to_tensors(known: KnownModels, model: str, input: Value | list[Value]) -> Value | list[Value]:
    """Convert one or more JSON values to a model's tensors. Raises RequestError if the model doesn't take them."""
    return finish(to_tensors_in_steps(known, model, input))


def to_tensors_in_steps(known: KnownModels, model: str, input: Value | list[Value]) -> Steps[Value | list[Value]]:
    """Convert long JSON values in steps; see `to_tensors`."""
    if not isinstance(input, list):
        return (yield from _converted(known, model, input, ""))
    converted: list[Value] = []
    for position, value in enumerate(input):
        converted.append((yield from _converted(known, model, value, f" - at `$.inputs[{position}]`")))
        yield 0
    return converted


def _converted(known: KnownModels, model: str, input: Value, place: str) -> Steps[Tensors]:
    try:
        tensors = yield from tensors_in_steps(input, known[model].inputs)
    except NoTensors as exc:
        raise BadRequest(f"{exc}{place}") from None
    if place and (failure := known.check(model, tensors)) is not None:
        raise error_of(msgspec.structs.replace(failure, message=failure.message + place))
    return tensors
