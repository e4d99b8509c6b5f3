"""Inference routes: the codec of each path. Their requests are answered on the fast path."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.config import Settings
from headway.http.inference.codecs import Codec, inference, plain, predict

ROUTES: Mapping[str, Callable[[Settings], Codec]] = {
    "/v1/inference": inference,
    "/api/inference": plain,
    "/v1/predict": predict,
}
"""Makers of the codecs, by path of the inference route."""


def codecs(settings: Settings) -> dict[str, Codec]:
    """Codecs by path, with the checks that these settings ask for."""
    return {path: make(settings) for path, make in ROUTES.items()}
