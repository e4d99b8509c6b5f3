"""Figures of one GPU, as its driver tells them."""

from __future__ import annotations

import msgspec

MODEL_XIDS = frozenset((13, 31, 43, 45, 68, 109))
"""Xid errors that a program can cause by itself, or by its end, on a GPU that is well."""


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one GPU; None for what its driver does not tell.

    Attributes:
        uuid: id of the GPU, or of its part (MIG); empty where that is not known.
        name: name of its kind.
        memory_used, memory_total: bytes.
        utilisation: share of the last moment in which it computed anything, 0 to 1.
        power: watts.
        temperature: degrees Celsius.
        ecc_errors: memory errors that could not be corrected, since the driver was loaded.
        xids: number of its Xid errors that this process has heard of, by their code.
        lost: why nothing can run on it any more, in words; empty while it is there.
    """

    uuid: str = ""
    name: str = ""
    memory_used: int | None = None
    memory_total: int | None = None
    utilisation: float | None = None
    power: float | None = None
    temperature: float | None = None
    ecc_errors: int | None = None
    xids: dict[int, int] = {}
    lost: str = ""

    @property
    def memory_share(self) -> float:
        """Share of its memory in use, 0 to 1; 0 where that is not known."""
        return self.memory_used / self.memory_total if self.memory_used and self.memory_total else 0.0
