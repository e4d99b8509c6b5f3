"""A target with JSON inputs and outputs: it ranks documents by the words that they share with a query.

headway serve examples/ranking.py:rank
headway serve "examples/ranking.py:Ranker(most=3)"

curl 127.0.0.1:8000/v1/inference -d '{"input": {"query": "fast trains", "documents": ["a fast car", "trains are fast"]}}'
"""

from __future__ import annotations

from typing import Any, ClassVar


class Ranker:
    """Ranks the documents of each input. `most`: documents in an answer."""

    example: ClassVar[dict[str, Any]] = {"query": "fast trains", "documents": ["a fast car", "trains are fast"]}
    """Input of the batch that has to pass before the first request."""

    def __init__(self, most: int = 10) -> None:
        self.most = most

    def __call__(self, inputs: list[dict[str, Any]]) -> list[list[dict[str, Any]] | Exception]:
        """Documents of each input, best first, each with its score."""
        return [self._ranked(one) for one in inputs]

    def _ranked(self, one: dict[str, Any]) -> list[dict[str, Any]] | Exception:
        try:
            words = set(one["query"].lower().split())
            scored = [(len(words & set(text.lower().split())) / len(words), text) for text in one["documents"]]
        except (TypeError, KeyError, AttributeError, ZeroDivisionError):
            return ValueError('expected {"query": "…", "documents": ["…", …]}')
        scored.sort(reverse=True)
        return [{"text": text, "score": score} for score, text in scored[: self.most]]


rank = Ranker()
"""The same with its default."""
