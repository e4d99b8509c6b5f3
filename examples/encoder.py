"""A model of the size of BERT-large with random weights, for trying Headway on a real GPU with nothing but PyTorch.

    headway serve examples/encoder.py:Encoder --max-batch-size 64
    headway bench http://127.0.0.1:8000 --rate 2000 --expect upper

24 layers of 1,024 in half precision, 128 tokens an input: the first bytes of the text, filled up. The answer is the text in
capitals, which the GPU makes of the same tokens, so that a client can tell that it got its own.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

TOKENS = 128
WIDTH, HEADS, LAYERS = 1024, 16, 24
LARGEST = 64
"""Largest batch that is run ahead."""


class Layer(nn.Module):  # type: ignore[misc]  # PyTorch is not there when this is checked.
    """Layer of an encoder: attention, then two products."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class Encoder:
    """Answers each text in capitals."""

    def setup(self, device: str) -> None:
        torch.manual_seed(1)
        self.device = torch.device(device)
        kind = torch.float32 if device == "cpu" else torch.float16
        with self.device:
            self.embedding = nn.Embedding(256, WIDTH).to(kind)
            self.layers = nn.Sequential(*(Layer(WIDTH, HEADS) for _ in range(LAYERS))).to(kind).eval()
        if device != "cpu":  # The first batch of each size takes some 0.06 s, as CUDA loads and chooses its kernels.
            for size in range(1, LARGEST + 1):
                self(["x"] * size)

    def __call__(self, inputs: list[str]) -> list[str]:
        with torch.inference_mode():
            return self._encode(inputs)

    def _encode(self, inputs: list[str]) -> list[str]:
        raw = [text.encode()[:TOKENS] for text in inputs]
        whole = bytearray(b"".join(one.ljust(TOKENS, b"\0") for one in raw))
        ids = torch.frombuffer(whole, dtype=torch.uint8).view(len(inputs), TOKENS).to(self.device)
        pooled = self.layers(self.embedding(ids.int())).mean(1)[:, 0].float()
        upper = torch.where((ids >= 97) & (ids <= 122), ids - 32, ids).cpu().numpy()
        if not all(map(math.isfinite, pooled.tolist())):
            raise RuntimeError("an encoding is not finite")
        return [bytes(row[: len(one)]).decode(errors="replace") for row, one in zip(upper, raw, strict=True)]
