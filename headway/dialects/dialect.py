"""Dialect: how one kind of remote API takes a batch and how it answers.

Dialects are frozen structs that do no I/O, so they can be sent as JSON to the process that decodes large answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

import msgspec

from headway.errors import SettingError
from headway.model import ItemResult, Signature, Value

JSON_BODY: Mapping[str, str] = MappingProxyType({"Content-Type": "application/json"})


class NoOutputs(Exception):
    """The answer doesn't hold one output for each input. The message quotes nothing of the answer."""


class NotSendable(Exception):
    """The batch holds something that the dialect cannot express; the message says what."""


class BadMetadata(Exception):
    """The remote model takes or gives something that cannot be sent or read; the message says what, and what to do."""


class RemoteCall(msgspec.Struct, frozen=True, gc=False):
    """One request to a remote API. An empty body makes it a GET request. `headers` come beside the header fields that every
    request has. `place` is a URL, or a gRPC method; empty for the one that batches go to."""

    body: bytes
    headers: Mapping[str, str] = JSON_BODY
    place: str = ""


class Dialect(msgspec.Struct, frozen=True):
    """Base of all dialects."""

    path: ClassVar[str] = ""
    """Pattern of URL paths that imply this dialect; empty if it must be named."""
    schemes: ClassVar[tuple[str, ...]] = ("http", "https")
    """URL schemes. A scheme other than http and https implies the dialect."""
    shared_parameters: ClassVar[bool] = False
    """True if a request has one set of parameters. Inputs with different parameters then go in separate requests."""

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Return where the API is and how to speak to it. `model` is the remote model's name, or empty. Raises SettingError if
        the URL or a setting doesn't fit the dialect."""
        raise NotImplementedError

    @property
    def signature(self) -> Signature:
        """The kinds of values that the API takes and gives."""
        return Signature()

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        """Encode a batch: texts, or tensors that differ only in their number of rows. For each input, `parameters` has a JSON
        object, or nothing; all equal if `shared_parameters`.

        Raises:
            UnicodeEncodeError: an input contains a lone surrogate.
            NotSendable: a parameter cannot be sent in this dialect.
        """
        raise NotImplementedError

    def decode(
        self, body: bytes | bytearray, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()
    ) -> list[ItemResult]:
        """Decode an answer into one result for each input, in order. A bad output fails only its own input. If the API reports
        tokens for the whole batch, the first result carries them. Raises NoOutputs if the answer doesn't hold that many outputs,
        or they can't be told apart.

        Arguments:
            body: the answer.
            expected: number of inputs.
            json_bytes: length of the JSON part if binary data follow it; -1 if the answer doesn't say.
            rows: rows of each input, 0 for an input without a row axis; empty if no input has one.
        """
        raise NotImplementedError

    def is_light(self, json_bytes: int) -> bool:
        """Return True if decoding an answer costs about as much as copying it. See `decode` for `json_bytes`."""
        return False

    def models(self, answer: bytes | bytearray) -> list[str]:
        """Return the model names in the API's list of models; empty if the answer isn't such a list."""
        return []

    def learn(self, metadata: bytes | bytearray) -> Self:
        """Return a copy of this dialect that follows the remote model's metadata. Raises BadMetadata if the model takes or gives
        something that this dialect can't send or read."""
        return self


class Remote(msgspec.Struct, frozen=True):
    """A remote API and its dialect. The repr leaves the URL out because its query may hold a secret.

    `metadata` and `models` ask for the model's metadata and the list of models; None if the API has none. `model` is empty if not
    known."""

    url: str
    dialect: Dialect
    metadata: RemoteCall | None = None
    models: RemoteCall | None = None
    model: str = ""

    def __repr__(self) -> str:
        return f"Remote({type(self.dialect).__name__})"


def needs_model(name: str, model: str) -> str:
    """Return the remote model's name, which the dialect `name` requires. Raises SettingError if the name is empty."""
    if not model:
        hint = "Set it to the remote model's name."
        raise SettingError(
            "remote_model", model, f"is empty, but every request of the dialect {name} must name a model", hint
        )
    return model


def raw_members(parameters: bytes) -> dict[str, Any]:
    """Return the members of a JSON object as undecoded text; empty for no text."""
    return dict(msgspec.json.decode(parameters, type=dict[str, msgspec.Raw])) if parameters else {}
