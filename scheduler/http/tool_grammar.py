"""Calls of tools as a grammar, in the form that the model writes them. Pure."""

import json
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from scheduler.http.chat_requests import Tool
from scheduler.http.errors import MAX_NAME_CHARS, invalid
from scheduler.http.lark import Grammar, literal, one_of
from scheduler.http.markers import CALL, CALL_END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END
from scheduler.http.tool_calls import CallForm
from scheduler.http.tool_schema import ANY, TEXT, ToolSchema

ABOUT = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"})
"""What a schema may say besides, which binds nothing."""

_OBJECT = ABOUT | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$ref"}
_STRING = ABOUT | {"type", "minLength", "maxLength", "enum", "const", "$ref", "$defs", "definitions"}
_SIMPLE = ABOUT | {"type"}
_DEFINITIONS = ("$defs", "definitions")
_VALUE_END = f"\n{PARAMETER_END}\n"


Binding = Literal["free", "loose", "exact"]
"""How far a tool's schema binds its arguments: not at all; as far as it can be enforced; in full, or refused."""


def call_end(grammar: Grammar, tool: Tool, form: CallForm, binding: Binding, where: str) -> str:
    """A rule for a call of `tool` from behind `<tool_call>` on.

    Only where calls are XML does "loose" leave some of a schema to the model: arguments as JSON are bound in full.
    ApiError, naming the part of `where`, for what the form has no grammar for.
    """
    name, root = tool.function.name, {"type": "object", **(tool.function.parameters or {})}
    schema = ToolSchema(root)
    if "object" not in schema.types(root):
        raise invalid(f"{where}.function.parameters is no schema of an object", "tools")
    end = grammar.marker(CALL_END)
    if form == "json":
        arguments = grammar.json({"type": "object"} if binding == "free" else root)
        opening = literal(f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
        closing = literal("}\n")
        return grammar.rule(f"{opening} {arguments} {closing} {end}")
    if binding == "free":
        parameters = [_any_parameters(grammar)]
    else:
        parameters = _XmlParameters(grammar, schema, binding == "exact", f"{where}.function.parameters").rules()
    opening = literal(f"\n{FUNCTION}{name}>\n")
    closing = literal(FUNCTION_END + "\n")
    return grammar.rule(" ".join([opening, *parameters, closing, end]))


def calls(grammar: Grammar, ends: list[str], several: bool) -> str:
    """An expression for one call, or several, of the tools whose calls end as `ends` say."""
    call = grammar.rule(f"{grammar.marker(CALL)} {one_of(*ends)}")
    return f"{call} ({literal(chr(10))} {call})*" if several else call


def _any_parameters(grammar: Grammar) -> str:
    value = grammar.rule(grammar.text_without(PARAMETER_END), f"[suffix={literal(_VALUE_END)}]")
    parameter = grammar.rule(f"{literal(PARAMETER)} /[^>\\n]+/ {literal('>' + chr(10))} {value}")
    return f"{parameter}*"


class _XmlParameters:
    """Parameters in the order of the schema; values are text, but for those that are no strings."""

    def __init__(self, grammar: Grammar, schema: ToolSchema, exact: bool, where: str) -> None:
        self._grammar = grammar
        self._schema = schema
        self._exact = exact
        self._where = where

    def rules(self) -> list[str]:
        """An expression for each."""
        schema = _mapping(self._resolved(self._schema.root, self._where), self._where)
        self._only(schema, _OBJECT, self._where)
        properties = dict(_mapping(schema.get("properties", {}), f"{self._where}.properties"))
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise invalid(f"{self._where}.required is no list of names", "tools")
        properties = properties | {name: {} for name in required if name not in properties}
        needed = frozenset(required)
        return [self._parameter(name, value) + ("" if name in needed else "?") for name, value in properties.items()]

    def _parameter(self, name: str, schema: Any) -> str:
        where = f"{self._where}.properties.{name[:MAX_NAME_CHARS]}"
        if not name or ">" in name or "\n" in name:
            raise invalid(f"{where}: this model's calls have no such names of parameters", "tools")
        opening = literal(f"{PARAMETER}{name}>\n")
        return self._grammar.rule(f"{opening} {self._value(schema, where)}")

    def _value(self, schema: Any, where: str) -> str:
        end = literal(_VALUE_END)
        target = {} if schema is True else _mapping(self._resolved(schema, where), where)
        allowed = self._schema.types(schema)
        if "string" not in allowed:
            root = self._schema.root
            definitions = {key: root[key] for key in _DEFINITIONS if key in root}
            return f"{self._grammar.json({**target, **definitions})} {end}"
        if "enum" in target and not isinstance(target["enum"], list):
            raise invalid(f"{where}.enum is no list", "tools")
        if stated := self._schema.stated_values(target):
            values = [value if isinstance(value, str) else json.dumps(value) for value in stated]
            return f"{one_of(*map(literal, values))} {end}"
        text = allowed == TEXT
        if self._exact:
            self._only(target, _STRING if text else _SIMPLE, where)
        least = _length(target.get("minLength", 0), where) if text else 0
        most = _length(target["maxLength"], where) if text and "maxLength" in target else None
        return self._grammar.rule(self._grammar.text_without(PARAMETER_END, least, most), f"[suffix={end}]")

    def _resolved(self, schema: Any, where: str) -> Any:
        """What `schema` refers to, or itself. If calls are to be exact, it is there, and of types that there are."""
        target = self._schema.resolved(schema)
        if self._exact and self._schema.target(schema) is None:
            raise invalid(f"{where}.$ref leads nowhere", "tools", "unsupported_schema")
        stated = target.get("type") if self._exact and isinstance(target, Mapping) else None
        for name in stated if isinstance(stated, list) else () if stated is None else (stated,):
            if not isinstance(name, str) or name not in ANY:
                raise invalid(
                    f"{where}.type: there is no type {str(name)[:MAX_NAME_CHARS]!r}", "tools", "unsupported_schema"
                )
        return target

    def _only(self, schema: Mapping[str, Any], known: frozenset[str], where: str) -> None:
        for key in schema:
            if key not in known:
                _refuse(key, where)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise invalid(f"{where} is no object", "tools")
    return value


def _length(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise invalid(f"{where}: minLength and maxLength are whole numbers", "tools")
    return value


def _refuse(key: str, where: str) -> NoReturn:
    raise invalid(
        f"{where}: {key[:MAX_NAME_CHARS]} cannot be enforced in the form in which this model writes calls",
        "tools",
        "unsupported_schema",
    )
