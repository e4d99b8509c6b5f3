"""Inference routes: the codec of each path, and the error format of each path."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from urllib.parse import unquote_to_bytes

import httptools
from msgspec.structs import replace

from headway.config import Settings
from headway.http.inference.codecs import Codec, inference, plain, predict
from headway.http.openai.chat import chat_reader, completions_reader
from headway.http.openai.embeddings import embeddings_reader
from headway.http.openai.members import openai_codec
from headway.http.openai.responses import responses_reader
from headway.http.problem import EncodeError, encode_path_error, encode_problem, encode_stray_error
from headway.http.server.head import RequestTarget
from headway.oip.rest.answers import encode_error as encode_oip_error
from headway.oip.rest.requests import infer

ROUTES: Mapping[str, Callable[[Settings], Codec]] = {
    "/v1/inference": inference,
    "/api/inference": plain,
    "/v1/predict": predict,
    "/v1/completions": lambda settings: openai_codec(completions_reader(settings)),
    "/v1/chat/completions": lambda settings: openai_codec(chat_reader(settings)),
    "/v1/responses": lambda settings: openai_codec(responses_reader(settings)),
    "/v1/embeddings": lambda settings: openai_codec(embeddings_reader(settings)),
    "/v2/models/{model:path}/versions/{version}/infer": infer,
    "/v2/models/{model:path}/infer": infer,
    "/v2/infer": infer,
}
"""Functions that make codecs, by path; the first match counts. `{model}` may contain %2F, `{model:path}` also slashes."""

_BULK = ("batches", "files")  # OpenAI's routes that are served only if bulk jobs have a folder (`bulk_dir`).
_UNSERVED = (  # OpenAI's routes that are not served. They answer 404 in OpenAI's format.
    "assistants", "audio", "conversations", "fine_tuning", "images", "moderations", "threads", "uploads", "vector_stores", "videos",
)  # fmt: skip

ERROR_FORMS: Mapping[str, EncodeError] = {  # Error encoders by path. They apply to all paths below, served or not.
    "/v2": encode_oip_error,
    "/v1/completions": encode_path_error,
    "/v1/chat": encode_path_error,
    "/v1/embeddings": encode_path_error,
    "/v1/models": encode_path_error,
    "/v1/responses": encode_path_error,
    "/completions": encode_stray_error,
    "/chat/completions": encode_stray_error,
    "/embeddings": encode_stray_error,
    "/models": encode_stray_error,
    "/responses": encode_stray_error,
    **{f"/v1/{name}": encode_path_error for name in (*_BULK, *_UNSERVED)},
    **{f"/{name}": encode_stray_error for name in (*_BULK, *_UNSERVED)},
}

_NO_NAMES: Mapping[str, str] = {}


def codecs(settings: Settings) -> dict[str, Codec]:
    """Return the codecs of all inference routes, by path."""
    return {path: replace(make(settings), way=f"POST {path.replace(':path', '')}") for path, make in ROUTES.items()}


class Routes:
    """The inference routes of one listener."""

    def __init__(self, settings: Settings) -> None:
        by_path = codecs(settings)
        self._exact = {path.encode(): codec for path, codec in by_path.items() if "{" not in path}
        self._open = [(_pattern(path), codec) for path, codec in by_path.items() if "{" in path]
        self._forms = [(path.encode(), form) for path, form in ERROR_FORMS.items()]

    def find(self, target: bytes) -> tuple[Codec, RequestTarget] | None:
        """Return the codec for a target, and the variable parts of the target. Return None if it isn't an inference route."""
        path, query = _split(target)
        codec = self._exact.get(unquote_to_bytes(path) if b"%" in path else path)
        if codec is not None:
            return codec, RequestTarget(_NO_NAMES, query)
        for pattern, codec in self._open:
            if (match := pattern.fullmatch(path)) is not None:
                names = {
                    name: unquote_to_bytes(part).decode(errors="replace") for name, part in match.groupdict().items()
                }
                return codec, RequestTarget(names, query)
        return None

    def error_form(self, target: bytes) -> EncodeError:
        path, _ = _split(target)
        for prefix, form in self._forms:
            if path.startswith(prefix) and path[len(prefix) : len(prefix) + 1] in (b"", b"/"):
                return form
        return encode_problem


def _pattern(path: str) -> re.Pattern[bytes]:
    text = ""
    for place, part in enumerate(re.split(r"{(\w+(?::path)?)}", path)):
        name, _, slashes = part.partition(":")
        text += re.escape(part) if place % 2 == 0 else f"(?P<{name}>{'.+?' if slashes else '[^/]+'})"
    return re.compile(text.encode())


def _split(target: bytes) -> tuple[bytes, bytes]:
    path, _, query = target.partition(b"?")
    if not path.startswith(b"/"):
        try:
            path = httptools.parse_url(target).path or b"/"
        except httptools.HttpParserInvalidURLError:
            return b"", b""
    return path, query
