import numpy as np


class Halved:
    """Halves rows of four numbers. Fails on 13. NaN stays NaN."""

    example = np.zeros(4, np.float32)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if (x == 13).any():
            raise ValueError("thirteen")
        return x[:, :2] / 2
