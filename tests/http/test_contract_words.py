import json
import re
from typing import Any

from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from headway.config import Settings
from headway.http import openapi

METHODS = ("get", "post", "delete")
LIMITED = {"RateLimit-Policy", "RateLimit"}


def document(**known: Any) -> dict[str, Any]:
    return openapi.document(Settings(**{"bulk_dir": "jobs", **known}))


def test_the_contract_keeps_the_specification_and_all_that_it_refers_to_is_there() -> None:
    for contract in (document(), document(bulk_dir="")):
        OPENAPI_31_VALIDATOR.validate(contract)
        text = json.dumps(contract)
        assert "${" not in text
        assert '"..."' not in text
        references = re.findall(r'"\$ref": "#/components/(\w+)/([\w-]+)"', text)
        assert references
        assert [(kind, name) for kind, name in references if name not in contract["components"][kind]] == []


def test_bulk_jobs_are_in_the_contract_where_they_are_served() -> None:
    with_jobs, without = document()["paths"].keys(), document(bulk_dir="")["paths"].keys()
    of_jobs = {path for path in with_jobs if path.startswith(("/v1/files", "/v1/batches"))}
    assert with_jobs - without == of_jobs and len(of_jobs) == 6


def test_every_answer_to_a_caller_with_limits_has_their_fields() -> None:
    limited = [
        (path, response.get("headers", {}))
        for path, item in document(keys="keys.toml")["paths"].items()
        for method in METHODS
        if method in item and item[method]["security"]
        for status, response in item[method]["responses"].items()
        if status < "300"
    ]
    assert len(limited) > 5
    assert [path for path, headers in limited if not headers.keys() >= LIMITED] == []
