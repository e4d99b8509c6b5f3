"""Each dialect by name, and the choice of a dialect for a URL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from headway.dialects import AUTO
from headway.dialects.dialect import Dialect, Remote
from headway.dialects.openai import Completions, Embeddings
from headway.dialects.texts import NamedInputs, TextList
from headway.errors import SettingError
from headway.oip.dialect_grpc import OpenInferenceGrpc
from headway.oip.dialect_rest import OpenInferenceHttp

DIALECTS: Mapping[str, type[Dialect]] = {
    "list": TextList,
    "inputs": NamedInputs,
    "oip": OpenInferenceHttp,
    "oip-grpc": OpenInferenceGrpc,
    "openai-completions": Completions,
    "openai-embeddings": Embeddings,
}


def reach(url: str, name: str = AUTO, model: str = "") -> Remote:
    """Return the API at a URL without credentials, in the dialect `name` or AUTO. `model` is the remote model's name, or empty.
    Raises SettingError if the URL or a setting doesn't fit the dialect."""
    parts = urlsplit(url)
    chosen = _implied_by(parts.scheme, parts.path) if name == AUTO else name
    kind = DIALECTS[chosen]
    if parts.scheme not in kind.schemes:
        hint = f"Use a URL of {' or '.join(f'{scheme}://' for scheme in kind.schemes)}, or leave it out."
        raise SettingError("remote_format", name, f"is not spoken over {parts.scheme}://", hint)
    return kind.reach(url, model)


def _implied_by(scheme: str, path: str) -> str:
    kinds = {name: kind for name, kind in DIALECTS.items() if scheme in kind.schemes}
    if scheme not in Dialect.schemes and kinds:
        return next(iter(kinds))
    if re.fullmatch(".*/chat/completions/?", path):
        hint = "Name its …/v1/completions, which takes a list of prompts."
        reason = f"finds no dialect for {path}, because that path takes a single conversation per request"
        raise SettingError("remote_format", AUTO, reason, hint)
    return next((name for name, kind in kinds.items() if kind.path and re.fullmatch(kind.path, path)), "list")
