"""Dialects of remote APIs that take batches: pure functions from a batch to a request, and from an answer to items.

dialect     what a dialect is
json_lists  lists of exactly so many elements, out of JSON that may be anything
openai      what both dialects of OpenAI's have in common

Each other module is one dialect, or several that differ in a word, and has its line in DIALECTS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from headway.dialects.dialect import BadMetadata, Dialect, NoOutputs, NotSendable, Remote, RemoteCall
from headway.dialects.openai_completions import Completions
from headway.dialects.openai_embeddings import Embeddings
from headway.dialects.texts import NamedInputs, TextList
from headway.errors import SettingError

__all__ = [
    "AUTO",
    "DIALECTS",
    "BadMetadata",
    "Dialect",
    "NoOutputs",
    "NotSendable",
    "RemoteCall",
    "Remote",
    "reach",
]

AUTO = "auto"
"""Name that stands for the dialect which the URL's path tells, and for `list` if it tells none."""

DIALECTS: Mapping[str, type[Dialect]] = {
    "list": TextList,
    "inputs": NamedInputs,
    "openai-completions": Completions,
    "openai-embeddings": Embeddings,
}
"""Dialects by name."""


def reach(url: str, name: str = AUTO, model: str = "") -> Remote:
    """Say how the API at a URL is spoken to.

    Arguments:
        url: http or https URL, without credentials.
        name: name of a dialect, or AUTO.
        model: name of the model over there; empty: not said.

    Raises:
        SettingError: the URL or a setting does not fit the dialect.
    """
    chosen = _told_by(urlsplit(url).path) if name == AUTO else name
    return DIALECTS[chosen].reach(url, model)


def _told_by(path: str) -> str:
    if re.fullmatch(".*/chat/completions/?", path):
        hint = "Name its …/v1/completions, which takes a list of prompts."
        raise SettingError("remote_format", AUTO, f"finds no dialect for {path}, which takes one conversation", hint)
    return next((name for name, kind in DIALECTS.items() if kind.path and re.fullmatch(kind.path, path)), "list")
