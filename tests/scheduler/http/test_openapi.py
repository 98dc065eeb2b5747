"""The description against the routes that the app has, JSON Schema's own rules, and what Structs take."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from copyengine.wire.errors import RequestRefused
from scheduler.chat_template import ChatTemplate
from scheduler.http import openapi
from scheduler.http.chat_prompt import chat_prompt
from scheduler.http.chat_requests import ChatRequest
from scheduler.http.completions import CompletionRequest, _check, _parts
from scheduler.http.default_sampling import DefaultSampling
from scheduler.http.errors import ApiError
from scheduler.http.openapi import document
from scheduler.http.routes import ROUTES
from scheduler.http.sampling_fields import sampling_of
from scheduler.protocol import Generate
from scheduler.validate import check_generate
from tests.scheduler.http.rig import serving
from tests.scheduler.rig import on_loop

MODEL = "org/made-up"
DOCUMENTS = {has_key: document(ROUTES, MODEL, has_key) for has_key in (False, True)}


def operations(described: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


def test_every_route_is_described_and_nothing_else() -> None:
    described = [(method, path) for method, path, _ in operations(DOCUMENTS[False])]
    assert sorted(described) == sorted((route.method, route.path) for route in ROUTES)
    assert ("GET", "/openapi.json") in described and ("POST", "/v1/completions") in described


def test_it_is_made_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(routes: Any, name: str, has_key: bool) -> dict[str, Any]:
        made.append(name)
        return document(routes, name, has_key)

    monkeypatch.setattr(openapi, "document", counted)

    async def main() -> None:
        async with serving(model) as rig:
            rig.front.model = "once"
            first, second = [(await rig.http.get("/openapi.json")).content for _ in range(2)]
            assert made == ["once"] and first == second
            assert json.loads(first) == json.loads(msgspec.json.encode(document(ROUTES, "once", False)))

    on_loop("selector", main)


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for _, _, operation in operations(DOCUMENTS[False])]
    assert len(set(names)) == len(names)


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    described = json.loads(msgspec.json.encode(DOCUMENTS[True]))
    found = set(references(described))
    assert found
    for reference in found:
        place: Any = described
        for name in reference.removeprefix("#/").split("/"):
            place = place[name]
    for schema in described["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})


def test_a_key_is_asked_for_where_routes_are_guarded() -> None:
    asked = {(method, path): "security" in operation for method, path, operation in operations(DOCUMENTS[True])}
    assert asked == {(route.method, route.path): route.guarded for route in ROUTES}
    for method, path, operation in operations(DOCUMENTS[True]):
        assert ("401" in operation["responses"]) == asked[method, path]
    assert not any("security" in operation for _, _, operation in operations(DOCUMENTS[False]))
    assert "securitySchemes" not in DOCUMENTS[False]["components"]


def test_bodies_and_streams_are_described_where_routes_take_them() -> None:
    told = {(method, path): operation for method, path, operation in operations(DOCUMENTS[False])}
    for route in ROUTES:
        operation = told[route.method, route.path]
        assert ("requestBody" in operation) == (route.body is not None)
        assert ("text/event-stream" in operation["responses"]["200"]["content"]) == (route.event is not None)


def schema_of(name: str) -> jsonschema_rs.Validator:
    """A validator of one schema among the others that it refers to."""
    return jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name}", **DOCUMENTS[False]})


@pytest.mark.parametrize(
    ("field", "value", "takes"),
    [
        ("temperature", 0, True),
        ("temperature", -0.1, False),
        ("top_p", 0, False),
        ("top_p", 1, True),
        ("top_p", 1.1, False),
        ("top_k", -1, True),
        ("top_k", -2, False),
        ("min_p", 1.1, False),
        ("n", 0, False),
        ("n", 128, True),
        ("n", 129, False),
        ("seed", -(2**63), True),
        ("seed", -(2**63) - 1, False),
        ("stop", "", False),
        ("stop", ["x"] * 64, True),
        ("stop", ["x"] * 65, False),
        ("stop", ["x" * 1025], False),
        ("presence_penalty", 2.1, False),
        ("repetition_penalty", 0, False),
        ("logit_bias", {"5": 100}, True),
        ("logit_bias", {"5": 101}, False),
        ("max_tokens", 0, False),
        ("max_tokens", 1, True),
        ("logprobs", 20, True),
        ("logprobs", 21, False),
        ("prompt", [], False),
        ("prompt", [1, 2], True),
        ("prompt", ["a", "b"], True),
        ("prompt", [[1], [2]], True),
        ("prompt", ["a", 1], False),
        ("frobnicate", 1, False),
    ],
)
def test_the_limits_that_are_stated_are_the_engines(field: str, value: Any, takes: bool) -> None:
    """By the document and by what becomes of the request."""
    body = {"prompt": "x", field: value}
    assert schema_of("CompletionRequest").is_valid(body) == takes
    assert served(body) == takes


def served(body: dict[str, Any]) -> bool:
    """Whether Struct, endpoint and engine let it pass."""
    try:
        request = msgspec.json.decode(msgspec.json.encode(body), type=CompletionRequest)
        _check(request)
        parts = _parts(request.prompt)
        sampling = sampling_of(request, DefaultSampling(), len(parts), request.max_tokens, request.logprobs)
        check_generate(Generate(prompt="x", sampling=sampling), True, 400)
    except (msgspec.ValidationError, ApiError, RequestRefused):
        return False
    return True


@pytest.mark.parametrize("body", ["CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest"])
def test_the_served_model_is_the_only_one(body: str) -> None:
    """As front.check_model has it."""
    needed: dict[str, dict[str, Any]] = {"CompletionRequest": {"prompt": "x"}, "DetokenizeRequest": {"tokens": [1]}}
    fields = needed.get(body, {"messages": [{"role": "user", "content": "x"}]})
    for name, takes in ((MODEL, True), (None, True), ("other", False), ("", False)):
        assert schema_of(body).is_valid({**fields, "model": name}) == takes


@pytest.mark.parametrize(
    ("messages", "takes"),
    [
        ([], False),
        ([{"role": "user"}], False),
        ([{"role": "tool", "content": None}], False),
        ([{"role": "user", "content": "x"}, {"role": "assistant"}], True),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], True),
        ([{"role": "cat", "content": "x"}], False),
    ],
)
def test_messages_that_are_described_are_served(messages: list[dict[str, Any]], takes: bool) -> None:
    """By the document and by what reads chats."""
    assert schema_of("ChatRequest").is_valid({"messages": messages}) == takes
    try:
        request = msgspec.convert({"messages": messages}, ChatRequest)
        chat_prompt(request, [], ChatTemplate("{{ messages | length }}", {}, "x"))
    except (msgspec.ValidationError, ApiError):
        assert not takes
    else:
        assert takes
