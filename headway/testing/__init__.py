"""Tests of targets: a target under the real batcher, without ports.

from headway.testing import batched

def test_upper():
    with batched(upper, max_batch_size=4) as run:
        assert run("a") == "A"
        assert run.many(["b", "c"]) == ["B", "C"]
        assert run.batches == [["a"], ["b", "c"]]

harness    `batched` and what it returns
"""

from __future__ import annotations

from headway.testing.harness import BatchedTarget, batched

__all__ = ["BatchedTarget", "batched"]
