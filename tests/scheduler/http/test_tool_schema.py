"""What a schema allows, against hand-written types, and against a validator on values of each type."""

from typing import Any

import jsonschema_rs
import pytest

from scheduler.http.tool_schema import ANY, admits, types

ROOT = {
    "$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}, "a/b": {"type": "null"}},
    "definitions": {"s": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({}, ANY),
        (True, ANY),
        ({"description": "x"}, ANY),
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"const": 5}, {"integer"}),
        ({"enum": ["a", None]}, {"string", "null"}),
        ({"$ref": "#/$defs/n"}, {"integer"}),
        ({"$ref": "#/definitions/s"}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"null"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, {"string", "integer"}),
        ({"oneOf": [{"type": "array"}, {"const": True}]}, {"array", "boolean"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["string", "integer"]}]}, {"string"}),
        ({"anyOf": [{"anyOf": [{"type": "number"}]}]}, {"number"}),
        # what says nothing that can be used
        ({"$ref": "#/$defs/loop"}, ANY),
        ({"$ref": "#/nowhere"}, ANY),
        ({"$ref": "other.json"}, ANY),
        ({"type": 5}, ANY),
        ({"type": "text"}, ANY),
        ({"type": [5]}, ANY),
        ({"enum": 5, "anyOf": 5, "allOf": 5}, ANY),
        ({"anyOf": []}, ANY),
        (5, ANY),
    ],
)
def test_the_types_of_a_schema(schema: Any, names: set[str]) -> None:
    assert types(schema, ROOT) == names


@pytest.mark.parametrize("name", sorted(ANY))
def test_values_of_each_type(name: str) -> None:
    for value in (None, True, 0, -3, 2.0, 2.5, "", "5", [], [1], {}, {"a": 1}):
        assert admits(frozenset({name}), value) == jsonschema_rs.is_valid({"type": name}, value)
