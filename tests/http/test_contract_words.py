"""The OpenAPI document says what it means: no word that readers of it would pass over, and the names of docs/http.md."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.config import Settings
from headway.http import openapi

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
WORDS = {
    "parameter": "name in description required schema allowEmptyValue $ref",
    "operation": "operationId summary description parameters requestBody responses security",
    "response": "description headers content links $ref",
    "header": "description schema $ref",
    "media": "schema example",
    "schema": "$ref type description properties required items enum const examples example pattern format oneOf anyOf not "
    "minItems maxItems minLength maxLength minProperties maxProperties minimum maximum additionalProperties propertyNames "
    "default",
}
"""Words that each kind of object may have; a reader ignores any other word."""
INDEX = "/v2/repository/index"
METHODS = ("get", "post", "delete")
LIMITED = {"RateLimit-Policy", "RateLimit"}
PLACES = ("path", "query", "header")
TYPES = {"string", "integer", "number", "boolean", "object", "array", "null"}


def document(**known: Any) -> dict[str, Any]:
    return openapi.document(Settings(**{"bulk_dir": "jobs", **known}))


BELOW: dict[str, dict[str, str]] = {
    "contract": {"components": "components", "paths": "path"},
    "components": {"schemas": "schema", "parameters": "parameter", "responses": "response"},
    "path": {"parameters": "parameter", **dict.fromkeys(METHODS, "operation")},
    "operation": {"parameters": "parameter", "requestBody": "body", "responses": "response"},
    "body": {"content": "media"},
    "response": {"headers": "header", "content": "media"},
    "parameter": {"schema": "schema"},
    "header": {"schema": "schema"},
    "media": {"schema": "schema"},
    "schema": dict.fromkeys(
        ("properties", "oneOf", "anyOf", "items", "additionalProperties", "propertyNames"), "schema"
    ),
}
"""What there is below each kind of object, by its word for it."""
SEVERAL = {"paths", "schemas", "parameters", "responses", "headers", "content", "properties"}
"""Words for several objects by their names."""


def objects(kind: str = "contract", thing: Any = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and content of each object of the contract."""
    thing = document() if thing is None else thing
    yield kind, thing
    for word, below in BELOW[kind].items():
        found = thing.get(word, {})
        if isinstance(found, dict):
            found = found.values() if word in SEVERAL else [found]
        for one in found if isinstance(found, Iterable) else ():
            if one:
                yield from objects(below, one)


def test_every_place_of_the_contract_s_file_is_filled() -> None:
    text = json.dumps(document())
    assert "${" not in text
    assert '"..."' not in text


@pytest.mark.parametrize("kind", sorted(WORDS))
def test_each_object_says_only_what_its_kind_can_say(kind: str) -> None:
    said = [set(one) - {*WORDS[kind].split()} for found, one in objects() if found == kind]
    assert said
    assert not set().union(*said)


def test_types_and_places_are_such_as_there_are() -> None:
    for kind, one in objects():
        if kind == "schema" and "type" in one:
            types = [one["type"]] if isinstance(one["type"], str) else one["type"]
            assert TYPES.issuperset(types), one
        if kind == "parameter" and "$ref" not in one:
            assert {"name", "in", "description", "schema"} <= set(one), one
            assert one["in"] in PLACES, one
            assert one.get("required", False) is (one["in"] == "path"), one


def test_inference_routes_demand_a_body_and_probes_take_a_parameter_without_a_value() -> None:
    posts = {path: item["post"] for path, item in document()["paths"].items() if "requestBody" in item.get("post", {})}
    assert len(posts) > 12
    assert [path for path, post in posts.items() if path != INDEX and post["requestBody"]["required"] is not True] == []
    probes = [item["get"]["parameters"] for path, item in document()["paths"].items() if path.endswith("z")]
    assert [(one["name"], one["allowEmptyValue"]) for (one,) in probes] == [("verbose", True)] * 3


def test_bulk_jobs_are_in_the_contract_where_they_are_served() -> None:
    with_jobs, without = document(), document(bulk_dir="")
    of_jobs = {path for path in with_jobs["paths"] if path.startswith(("/v1/files", "/v1/batches"))}
    assert with_jobs["paths"].keys() - without["paths"].keys() == of_jobs and len(of_jobs) == 6
    for whole in (with_jobs, without):
        named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(whole)))
        assert named <= whole["components"]["schemas"].keys()


def test_what_a_schema_demands_it_describes() -> None:
    for kind, one in objects():
        if kind == "schema" and "required" in one and "properties" in one:
            assert set(one["required"]) <= set(one["properties"]), one


def test_header_fields_have_the_names_of_the_page() -> None:
    fields = [one["name"] for kind, one in objects() if kind == "parameter" and one.get("in") == "header"]
    assert fields
    for name in fields:
        assert f"`{name}" in PAGE, name


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
