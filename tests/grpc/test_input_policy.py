"""The input policy at the gRPC port: what Predict and ModelInfer bring is screened like anything else."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from tests.grpc.stand import INFER, PREDICT, Port, predict, predicted, served
from tests.grpc.test_open_inference import request

RULES = '[[rules]]\nname = "words"\npatterns = ["forbidden"]\n[[rules]]\nname = "unseen"\ncharacters = ["zero-width"]\n'


@pytest.mark.parametrize("raw", [False, True])
def test_a_rule_holds_in_calls_and_in_tensors(tmp_path: Path, raw: bool) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(RULES)

    async def main(port: Port) -> None:
        client = port.client()
        tensor = request("good", "for\u200bbidden", raw=raw).SerializeToString()
        for method, body in ((PREDICT, predict("for\u200bbidden")), (INFER, tensor)):
            found = await client.fail(method, body)
            assert (found.status, found.trailers["x-headway-error"]) == (
                grpc.StatusCode.INVALID_ARGUMENT, "REJECTED_BY_POLICY",
            )  # fmt: skip
            assert "rule 'words'" in found.details
            assert "forbidden" not in found.details
            assert found.trailers["grpc-retry-pushback-ms"] == "-1"
        assert predicted(await client.ask(PREDICT, predict("go\u200bod"))).output == b"GOOD"

    served(main, whole=True, input_policy=str(path))
