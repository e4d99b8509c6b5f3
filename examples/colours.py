"""An ONNX model under onnxruntime on the CPU: two named inputs, of which one is an image, and two named outputs.

    make examples
    headway serve examples/colours.py:Colours --max-batch-size 16

`image` is 224×224 pixels of red, green and blue as UINT8, `temperature` a number. `probabilities` says how likely each of four
colours is the image's own, the more evenly the higher the temperature; `best` is the place of the likeliest. The model is made here,
of operators of ONNX, when the worker starts: yours would come from a file.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "grey": (0.5, 0.5, 0.5)}
SIDE = 224


class Colours:
    """Tells the colour of images."""

    inputs: ClassVar[dict[str, tuple[str, list[int]]]] = {
        "image": ("UINT8", [SIDE, SIDE, 3]),
        "temperature": ("FP32", [1]),
    }
    outputs: ClassVar[dict[str, tuple[str, list[int]]]] = {
        "probabilities": ("FP32", [len(COLOURS)]),
        "best": ("INT64", []),
    }

    def setup(self, device: str) -> None:
        try:
            import onnxruntime

            model = network()
        except ImportError as exc:
            raise RuntimeError(f"{exc}. Run `make examples`, or in a checkout: pip install '.[examples]'") from exc
        self._session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs of all images of a batch: names and arrays are the model's own."""
        names = list(self.outputs)
        return dict(zip(names, self._session.run(names, inputs), strict=True))


def network() -> bytes:
    """The model, as a file has it: the mean colour, its distances from the known ones, and a softmax of these."""
    from onnx import TensorProto, checker, helper, numpy_helper

    known = np.array(list(COLOURS.values()), np.float32)
    constants: dict[str, Any] = {
        "full": np.float32(255), "axes": np.array([1, 2]), "known": known.T.copy(), "squares": (known**2).sum(1) / 2,
    }  # fmt: skip
    nodes = [
        helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["pixels", "axes"], ["sum"], keepdims=0),
        helper.make_node("Div", ["sum", "full"], ["mean"]),
        helper.make_node("MatMul", ["mean", "known"], ["products"]),
        helper.make_node("Sub", ["products", "squares"], ["scores"]),
        helper.make_node("Div", ["scores", "temperature"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["probabilities"], ["best"], axis=1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "colours",
        [
            helper.make_tensor_value_info("image", TensorProto.UINT8, ["rows", SIDE, SIDE, 3]),
            helper.make_tensor_value_info("temperature", TensorProto.FLOAT, ["rows", 1]),
        ],
        [
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["rows", len(COLOURS)]),
            helper.make_tensor_value_info("best", TensorProto.INT64, ["rows"]),
        ],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    checker.check_model(model)
    made: bytes = model.SerializeToString()
    return made
