"""What a tool's JSON schema says of its arguments' types. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

DEPTH = 16
"""References and alternatives that are followed."""

TEXT = frozenset({"string"})
ANY = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})


class Argument(Struct, frozen=True):
    """What an argument may be: the names of the types of its values, and the strings that it is limited to, if any."""

    types: frozenset[str]
    words: frozenset[str] = frozenset()


STRING = Argument(TEXT)


class ToolSchema:
    """The schema `root`, and what its parts say. Not to be changed meanwhile.

    Each part is looked at once, however often it is referred to, so that all questions together take as long as the
    schema is large. What cannot be known says nothing: a part within itself, or behind DEPTH others.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self._types: dict[int, frozenset[str]] = {}  # these by the part's id
        self._targets: dict[int, Any] = {}
        self._stated_words: dict[int, frozenset[str]] = {}

    def target(self, part: Any) -> Any:
        """The part that `part` refers to, if it does, or itself; None if that is not there."""
        for _ in range(DEPTH):
            if not _refers(part):
                return part
            part = self._target(part)
        return None

    def resolved(self, part: Any) -> Any:
        """The same; {} if it is not there."""
        target = self.target(part)
        return {} if target is None else target

    def types(self, part: Any, depth: int = DEPTH) -> frozenset[str]:
        """The names of the types that values of `part` may have; ANY if it does not say."""
        if not isinstance(part, Mapping) or depth == 0:
            return ANY
        if id(part) not in self._types:
            self._types[id(part)] = ANY  # while it is being looked at
            self._types[id(part)] = self._stated(part, depth)
        return self._types[id(part)]

    def stated_values(self, part: Any) -> list[Any]:
        """The values that `part` lists as the only ones; none if it lists none."""
        part = self.resolved(part)
        if not isinstance(part, Mapping):
            return []
        values = [part["const"]] if "const" in part else part.get("enum")
        return values if isinstance(values, list) else []

    def arguments(self) -> dict[str, Argument]:
        """Those that the schema has properties for, by name. One of which it does not say what it is, is a string."""
        properties = self.root.get("properties") if isinstance(self.root, Mapping) else None
        if not isinstance(properties, Mapping):
            return {}
        return {name: self._argument(part) for name, part in properties.items()}

    def _argument(self, part: Any) -> Argument:
        allowed = self.types(part)
        return STRING if allowed == ANY else Argument(allowed, self._words(self.resolved(part)))

    def _words(self, part: Any) -> frozenset[str]:
        if id(part) not in self._stated_words:
            words = frozenset(value for value in self.stated_values(part) if isinstance(value, str))
            self._stated_words[id(part)] = words
        return self._stated_words[id(part)]

    def _stated(self, part: Mapping[str, Any], depth: int) -> frozenset[str]:
        if _refers(part):
            return self.types(self._target(part), depth - 1)
        stated = part.get("type")
        if isinstance(stated, str):
            return frozenset({stated}) & ANY or ANY
        if isinstance(stated, list):
            return frozenset(name for name in stated if isinstance(name, str)) & ANY or ANY
        if "const" in part:
            return frozenset({type_name(part["const"])})
        if isinstance(part.get("enum"), list) and part["enum"]:
            return frozenset(map(type_name, part["enum"]))
        return self._combined(part, depth)

    def _combined(self, part: Mapping[str, Any], depth: int) -> frozenset[str]:
        allowed = ANY
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list):
                allowed &= frozenset().union(*(self.types(inner, depth - 1) for inner in part[key]))
        for inner in part["allOf"] if isinstance(part.get("allOf"), list) else ():
            allowed &= self.types(inner, depth - 1)
        return allowed or ANY

    def _target(self, part: Mapping[str, Any]) -> Any:
        """What a reference like "#/$defs/name" points to; None if to nothing."""
        if id(part) not in self._targets:
            self._targets[id(part)] = _at(self.root, part["$ref"])
        return self._targets[id(part)]


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


def _refers(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("$ref"), str)


def _at(root: Any, reference: str) -> Any:
    """What a reference like "#/$defs/name" points to; None if to nothing."""
    if not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) else None
    return root
