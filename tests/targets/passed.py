"""A target of arrays that halves what it gets."""

import numpy as np


class Halved:
    """Rows of four numbers, each halved. One that holds 13 is refused, and NaN is given back."""

    example = np.zeros(4, np.float32)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if (x == 13).any():
            raise ValueError("thirteen")
        return x[:, :2] / 2
