"""Lines of bulk jobs: inputs that run in seats which would stay empty."""

from __future__ import annotations

import msgspec

from headway.model.value import Value


class BulkLine(msgspec.Struct, frozen=True, gc=False):
    """One line of a bulk job on its way to a GPU.

    Attributes:
        job: id of the job, `batch_…`.
        tenant: account whose job it is.
        number: number of the line in its file, from 1.
        model: name of the model that must answer.
        version: version of the model; empty: any.
        input: the value for the model.
        parameters: the line's `parameters` as the text of one JSON object; empty for none.
    """

    job: str
    tenant: str
    number: int
    model: str
    version: str
    input: Value
    parameters: bytes = b""
