"""A classifier of scikit-learn: one array in, two out.

    make examples
    headway serve examples/iris.py:Iris
    curl 127.0.0.1:8000/v1/inference -d '{"input": [6.1, 2.8, 4.7, 1.2]}'

The input is four measures of a flower, in cm. The outputs are its species, and how likely each of the three is. The model is
made when the worker starts, of the 150 flowers that come with scikit-learn.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np


class Iris:
    """Tells the species of irises."""

    example: ClassVar[np.ndarray] = np.array([5.1, 3.5, 1.4, 0.2], np.float32)
    """One input: its dtype and shape are those of every input."""
    outputs: ClassVar[dict[str, tuple[str, list[int]]]] = {"label": ("BYTES", []), "probabilities": ("FP32", [3])}

    def setup(self, device: str) -> None:
        try:
            from sklearn.datasets import load_iris
            from sklearn.linear_model import LogisticRegression
        except ImportError as exc:
            raise RuntimeError(f"{exc}. Run `make examples`, or in a checkout: pip install '.[examples]'") from exc
        flowers = load_iris()
        self._names = flowers.target_names
        self._model = LogisticRegression(max_iter=1000).fit(flowers.data.astype(np.float32), flowers.target)

    def __call__(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """Outputs of all flowers of a batch, whose measures are the rows of `x`."""
        probabilities = self._model.predict_proba(x).astype(np.float32)
        return {"label": self._names[probabilities.argmax(axis=1)], "probabilities": probabilities}
