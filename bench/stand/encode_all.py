"""Yardstick of a real model: strings a second of its own `encode` in one call, which sorts them by length and splits them into batches.

python bench/stand/encode_all.py FILE     a JSON array of strings
"""

import importlib
import sys
import time
from pathlib import Path

import msgspec

BATCH = 32


def main() -> int:
    texts = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[str])
    embedder = importlib.import_module("examples.embeddings").Embedder()
    embedder.setup("cpu")
    embedder(texts[:BATCH])
    started = time.perf_counter()
    embedder._encode(texts, batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False)
    print(len(texts) / (time.perf_counter() - started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
