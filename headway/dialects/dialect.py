"""Dialect: how one kind of remote API takes a batch, and how it answers.

A dialect is a frozen struct, so that the process that reads a large answer can be given it as JSON. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

import msgspec

from headway.errors import SettingError
from headway.model import ItemResult, Signature, Value

JSON_BODY: Mapping[str, str] = MappingProxyType({"Content-Type": "application/json"})
"""Header fields of a request whose body is JSON."""


class NoOutputs(Exception):
    """The answer does not hold one output for each input. The text quotes nothing of it."""


class NotSendable(Exception):
    """Batch that holds something for which a request of the dialect has no place. Says what that is."""


class BadMetadata(Exception):
    """The model of a remote API takes or gives something that cannot be sent or read. Says what, and what to do."""


class RemoteCall(msgspec.Struct, frozen=True, gc=False):
    """One request to a remote API.

    Attributes:
        body: body of the request; empty: it only asks.
        headers: header fields that go with it.
        place: URL, or method of gRPC, that it goes to; empty: that of batches.
    """

    body: bytes
    headers: Mapping[str, str] = JSON_BODY
    place: str = ""


class Dialect(msgspec.Struct, frozen=True):
    """Base of all dialects."""

    path: ClassVar[str] = ""
    """Pattern of the paths of URLs that tell this dialect; empty: it has to be named."""
    schemes: ClassVar[tuple[str, ...]] = ("http", "https")
    """Schemes of its URLs. Any other than http and https tells the dialect by itself."""
    shared_parameters: ClassVar[bool] = False
    """Whether parameters are those of the whole request. Inputs with different ones then go in requests of their own."""

    @classmethod
    def reach(cls, url: str, model: str) -> Remote:
        """Say where the API is, and how it is spoken to. `model` is the name of the remote model; empty: not said.

        Raises:
            SettingError: the URL or a setting does not fit the dialect.
        """
        raise NotImplementedError

    @property
    def signature(self) -> Signature:
        """Kinds of values that the API takes and gives."""
        return Signature()

    def encode(self, inputs: Sequence[Value], parameters: Sequence[bytes]) -> RemoteCall:
        """Encode a batch.

        Arguments:
            inputs: texts, or tensors that differ in nothing but their rows, as the signature says.
            parameters: text of a JSON object for each input, or empty; with `shared_parameters` all mean the same.

        Raises:
            UnicodeEncodeError: an input is no proper Unicode text.
            NotSendable: a parameter cannot be sent in this dialect.
        """
        raise NotImplementedError

    def decode(
        self, body: bytes | bytearray, expected: int, json_bytes: int = -1, rows: Sequence[int] = ()
    ) -> list[ItemResult]:
        """Read one item for each of the inputs out of an answer, in their order. A bad output fails that input alone.

        Where the API tells the tokens of all inputs together, the first item has them.

        Arguments:
            body: body of the answer.
            expected: number of inputs.
            json_bytes: bytes of the body that are JSON, where binary data follows; -1 where nothing says so.
            rows: rows of each input, 0 for one without an axis of rows to its reader; empty: each is such a one.

        Raises:
            NoOutputs: the answer does not hold that many outputs, or not in a form that can be told apart.
        """
        raise NotImplementedError

    def is_light(self, json_bytes: int) -> bool:
        """Whether reading an answer takes about as long as copying it. `json_bytes`: see `decode`."""
        return False

    def models(self, answer: bytes | bytearray) -> list[str]:
        """Read the names of the models that the API has out of its answer; empty where it holds none."""
        return []

    def learn(self, metadata: bytes | bytearray) -> Self:
        """Dialect that goes by what the API says of its model.

        Raises:
            BadMetadata: the model takes or gives something else than this dialect can send and read.
        """
        return self


class Remote(msgspec.Struct, frozen=True):
    """A remote API, with the dialect that it is spoken to in. Shown without its URL, whose query may hold a secret.

    Attributes:
        url: where batches are sent to.
        dialect: the dialect.
        metadata: request for what the API says of its model; None where it is not asked.
        models: request for the models that the API has; None where it is not asked.
        model: name of the remote model; empty: not said.
    """

    url: str
    dialect: Dialect
    metadata: RemoteCall | None = None
    models: RemoteCall | None = None
    model: str = ""

    def __repr__(self) -> str:
        return f"Remote({type(self.dialect).__name__})"


def needs_model(name: str, model: str) -> str:
    """Check that the model's name is there.

    Raises:
        SettingError: it is not.
    """
    if not model:
        hint = "Set it to the remote model's name."
        raise SettingError(
            "remote_model", model, f"is empty, and every request of the dialect {name} names the model", hint
        )
    return model


def raw_members(parameters: bytes) -> dict[str, Any]:
    """Members of a JSON object, each as its own text; none for an empty text."""
    return dict(msgspec.json.decode(parameters, type=dict[str, msgspec.Raw])) if parameters else {}
