"""Driver that sets nothing: the number of workers is only published, for a scaler elsewhere such as KEDA."""

from __future__ import annotations

from headway.ports import ScalingDriver


class NoScaling(ScalingDriver):
    """Driver without a platform. See `headway.ports.ScalingDriver`."""

    async def current(self, model: str) -> int:
        """See ScalingDriver. Nobody can be asked."""
        return 0

    async def scale(self, model: str, workers: int) -> None:
        """See ScalingDriver. Nobody is told."""
