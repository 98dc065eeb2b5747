"""What a tool's JSON schema says of an argument's type. Pure."""

from collections.abc import Mapping
from typing import Any

DEPTH = 16
"""References and alternatives that are followed."""

TEXT = frozenset({"string"})
ANY = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})


def resolved(schema: Any, root: Any) -> Any:
    """The schema that `schema` refers to within `root`, if it does, or itself; {} if that is not there."""
    for _ in range(DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = _at(root, schema["$ref"])
    return {}


def types(schema: Any, root: Any, depth: int = DEPTH) -> frozenset[str]:
    """The names of the types that values of `schema`, a part of `root`, may have; ANY if it does not say."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth == 0:
        return ANY
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset({stated}) & ANY or ANY
    if isinstance(stated, list):
        return frozenset(name for name in stated if isinstance(name, str)) & ANY or ANY
    if "const" in schema:
        return frozenset({type_name(schema["const"])})
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return frozenset(map(type_name, schema["enum"]))
    return _combined(schema, root, depth)


def stated_values(schema: Any, root: Any) -> list[Any]:
    """The values that `schema`, a part of `root`, lists as the only ones; none if it lists none."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else []


def _combined(schema: Mapping[str, Any], root: Any, depth: int) -> frozenset[str]:
    allowed = ANY
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            allowed &= frozenset().union(*(types(part, root, depth - 1) for part in schema[key]))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        allowed &= types(part, root, depth - 1)
    return allowed or ANY


def type_name(value: Any) -> str:
    """The JSON schema name of the type of a parsed value; an integer's is "integer"."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def admits(allowed: frozenset[str], value: Any) -> bool:
    """Whether a parsed value's type is among `allowed`."""
    name = type_name(value)
    if name == "integer" or (isinstance(value, float) and value.is_integer()):
        return bool(allowed & {"integer", "number"})
    return name in allowed


def _at(root: Any, reference: str) -> Any:
    """What a reference like "#/$defs/name" points to; {} if to nothing."""
    if not reference.startswith("#"):
        return {}
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return {} if root is None else root
