"""What a schema allows, against hand-written types, and against a validator on values of each type."""

from typing import Any

import jsonschema_rs
import pytest

from scheduler.http.tool_schema import ANY, STRING, Argument, ToolSchema, admits

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
    assert ToolSchema(ROOT).types(schema) == names


class Looks(dict[str, Any]):
    """An object that counts how often one of them is looked at."""

    count = 0

    def get(self, key: str, default: Any = None) -> Any:
        Looks.count += key == "$ref"
        return super().get(key, default)


def counted(value: Any) -> Any:
    if isinstance(value, dict):
        return Looks({key: counted(inner) for key, inner in value.items()})
    return [counted(inner) for inner in value] if isinstance(value, list) else value


def to(*names: str) -> dict[str, Any]:
    return {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}


@pytest.mark.parametrize(
    "definitions",
    [
        {"a": to("a", "a", "a", "a")},
        {"a": to("b", "c"), "b": to("a", "b", "c"), "c": {"allOf": [to("a", "b")], "oneOf": [to("c", "c")]}},
        {"a": to("b0", "b0"), **{f"b{i}": to(f"b{i + 1}", f"b{i + 1}") for i in range(30)}, "b30": {"type": "null"}},
    ],
)
def test_parts_that_refer_to_each_other_are_looked_at_once(definitions: dict[str, Any]) -> None:
    """Against the number of parts, each of which is asked a few times whether it refers; else it doubles each time."""
    root = counted({"properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(50)}, "$defs": definitions})
    Looks.count = 0
    assert set(ToolSchema(root).arguments()) == set(root["properties"])
    assert 50 < Looks.count < 1000


def test_what_stands_in_itself_is_anything_and_its_neighbours_are_not() -> None:
    loop = to("loop", "n")
    root = {"$defs": {"loop": loop, "n": {"type": "integer"}}, "properties": {"a": to("loop"), "b": to("n")}}
    schema = ToolSchema(root)
    assert schema.arguments() == {"a": STRING, "b": Argument(frozenset({"integer"}))}
    assert schema.types(root["properties"]["a"]) == ANY


def test_arguments_and_their_words() -> None:
    word = {"enum": ["5", 7, "null", None]}
    root = {"properties": {"a": {"$ref": "#/$defs/w"}, "b": {}, "c": {"const": "x"}}, "$defs": {"w": word}}
    assert ToolSchema(root).arguments() == {
        "a": Argument(frozenset({"string", "integer", "null"}), frozenset({"5", "null"})),
        "b": STRING,
        "c": Argument(frozenset({"string"}), frozenset({"x"})),
    }
    nothings: list[Any] = [None, True, 5, [], {}, {"properties": 5}]
    for nothing in nothings:
        assert ToolSchema(nothing).arguments() == {}


@pytest.mark.parametrize("name", sorted(ANY))
def test_values_of_each_type(name: str) -> None:
    for value in (None, True, 0, -3, 2.0, 2.5, "", "5", [], [1], {}, {"a": 1}):
        assert admits(frozenset({name}), value) == jsonschema_rs.is_valid({"type": name}, value)
