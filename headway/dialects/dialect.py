"""Base of the dialects, each of which encodes batches for one kind of remote API and decodes its answers.

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
Body = bytes | bytearray


class NoOutputs(Exception):
    """The answer doesn't hold one output for each input. The message quotes nothing of the answer."""


class NotSendable(Exception):
    """The batch holds something that the dialect cannot express. The message says what."""


class BadMetadata(Exception):
    """The remote model takes or gives something that cannot be sent or read. The message says what, and what to do."""


class RemoteCall(msgspec.Struct, frozen=True, gc=False):
    """One request to a remote API; a GET request if the body is empty. `headers` are added to the header fields that every request
    has. `place` is a URL or gRPC method; empty for the place that batches go to."""

    body: bytes
    headers: Mapping[str, str] = JSON_BODY
    place: str = ""


class Dialect(msgspec.Struct, frozen=True):
    """Base of all dialects."""

    path: ClassVar[str] = ""
    """Pattern of URL paths that imply this dialect; empty if users must name it."""
    schemes: ClassVar[tuple[str, ...]] = ("http", "https")
    """URL schemes. A scheme other than http and https implies the dialect."""
    shared_parameters: ClassVar[bool] = False
    """True if a request has one set of parameters, so that inputs with different parameters go in separate requests."""

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Return the API at a URL, in this dialect. `model` is the remote model's name, or empty. Raises SettingError if the URL or
        a setting doesn't fit the dialect."""
        raise NotImplementedError

    @property
    def signature(self) -> Signature:
        return Signature()

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        """Encode a batch: texts, or tensors that differ only in their number of rows. `parameters` has a JSON object or nothing for
        each input, and these are all equal with `shared_parameters`. Raises UnicodeEncodeError if an input contains a lone
        surrogate, NotSendable if a parameter cannot be sent in this dialect."""
        raise NotImplementedError

    def decode(self, body: Body, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()) -> list[ItemResult]:
        """Decode an answer into one result for each of the `expected` inputs, in order. A bad output fails only its own input. If
        the API reports tokens for the whole batch, the first result carries them. Raises NoOutputs if the answer doesn't hold that
        many outputs, or they can't be told apart.

        `json_bytes` is the length of the JSON part if binary data follow it, or -1 if the answer doesn't say. `rows` counts the
        rows of each input, 0 for an input without a row axis. It is empty if no input has a row axis.
        """
        raise NotImplementedError

    def is_light(self, json_bytes: int) -> bool:
        """Return True if decoding an answer costs about as much as copying it. See `decode` for `json_bytes`."""
        return False

    def models(self, answer: Body) -> list[str]:
        """Return the names in an API's list of models; empty if the answer isn't such a list."""
        return []

    def learn(self, metadata: Body) -> Self:
        """Return a copy of this dialect that follows the remote model's metadata. Raises BadMetadata."""
        return self


class Remote(msgspec.Struct, frozen=True):
    """A remote API and its dialect. The repr leaves the URL out because its query may hold a secret. `metadata` and `models` ask
    for the model's metadata and for the list of models; None if the API has none. `model` is the remote model's name, or empty."""

    url: str
    dialect: Dialect
    metadata: RemoteCall | None = None
    models: RemoteCall | None = None
    model: str = ""

    def __repr__(self) -> str:
        return f"Remote({type(self.dialect).__name__})"


def needs_model(name: str, model: str) -> str:
    """Return the remote model's name, which the dialect `name` requires. Raises SettingError if it is empty."""
    if not model:
        reason = f"is empty, but every request of the dialect {name} must name a model"
        raise SettingError("remote_model", model, reason, "Set it to the remote model's name.")
    return model


def raw_members(parameters: bytes) -> dict[str, Any]:
    """Return the undecoded members of a JSON object, or none for no text."""
    return dict(msgspec.json.decode(parameters, type=dict[str, msgspec.Raw])) if parameters else {}
