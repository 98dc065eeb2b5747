"""response_format, tool_choice and strict tools as one grammar that the answer must match. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from scheduler.http.chat_requests import ResponseFormat, Tool
from scheduler.http.errors import invalid
from scheduler.http.lark import Grammar, literal
from scheduler.http.markers import CALL, THINK, THINK_END
from scheduler.http.tool_calls import CallForm
from scheduler.http.tool_grammar import Binding, call_end, calls

Thinking = Literal["never", "may", "opened"]
"""Whether an answer thinks first: not, as the model likes, or since the prompt has begun it."""

SCHEMA_DEPTH = 128
"""Objects and lists in each other."""

_GAP = "/[ \\n]{0,4}/"
"""Between thinking and what is bound."""


class WantedCalls(Struct, frozen=True):
    """The tools that an answer may call, how calls are written, and which of them it must make.

    `must`: at least one; `several`: more than one, too.
    """

    tools: Sequence[Tool]
    form: CallForm
    must: bool
    several: bool


def answer_schema(wanted: ResponseFormat | None) -> Mapping[str, Any] | None:
    """The JSON schema of an answer's content; None if it is free. ApiError for a format that is none."""
    match wanted:
        case None | ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object"):
            return {"type": "object"}
        case ResponseFormat(type="json_schema", json_schema=format) if format is not None and format.schema is not None:
            check_schema(format.schema, "response_format.json_schema.schema")
            return format.schema
        case ResponseFormat(type="json_schema"):
            raise invalid("response_format: json_schema has no schema", "response_format")
    raise invalid(f"response_format.type {wanted.type!r} is none of text, json_object, json_schema", "response_format")


def check_schema(schema: Mapping[str, Any], where: str) -> None:
    """ApiError for a schema that tells the grammar's library what to do, or is nested beyond SCHEMA_DEPTH."""
    field = where.partition(".")[0].partition("[")[0]
    if "x-guidance" in schema:
        raise invalid(f"{where}: x-guidance is not supported", field)
    level: list[Any] = [schema]
    for _ in range(SCHEMA_DEPTH):
        level = [inner for value in level for inner in _inside(value) if isinstance(inner, (dict, list))]
        if not level:
            return
    raise invalid(f"{where} is nested more than {SCHEMA_DEPTH} deep", field)


def _inside(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def answer_grammar(
    schema: Mapping[str, Any] | None, wanted: WantedCalls | None, thinking: Thinking, tokens: Mapping[str, int]
) -> str:
    """The grammar of an answer; "" if it is free. `tokens`: the added tokens that it may hold, by their text.

    Thinking comes first, as long as it likes. Then, with `schema`, JSON or, if there are tools, calls; calls alone if
    there must be some. Otherwise text with calls in it, where the tools' schemas bind if some tool is strict.
    """
    grammar = Grammar(tokens)
    if wanted is not None and (wanted.must or schema is not None):
        body = calls(grammar, _ends(grammar, wanted), wanted.several)
        if not wanted.must and schema is not None:
            body = f"({body} | {grammar.json(schema)})"
    elif schema is not None:
        body = grammar.json(schema)
    elif wanted is not None and (not wanted.several or any(tool.function.strict for tool in wanted.tools)):
        return grammar.source(_thought(grammar, thinking, "") + _text_with_calls(grammar, wanted))
    else:
        return ""
    return grammar.source(_thought(grammar, thinking, _GAP) + body)


def _thought(grammar: Grammar, thinking: Thinking, blanks: str) -> str:
    if thinking == "never":
        return ""
    thought = f"{grammar.up_to(THINK_END)} {blanks}"
    return f"{thought} " if thinking == "opened" else f"({grammar.marker(THINK)} {thought})? "


def _text_with_calls(grammar: Grammar, wanted: WantedCalls) -> str:
    ends = _ends(grammar, wanted)
    call = grammar.rule(f"{grammar.up_to(CALL)} ({' | '.join(ends)})")
    if wanted.several:
        return f"{call}* {grammar.without(CALL)}"
    return f"({grammar.without(CALL)} | {call} {literal(chr(10))}?)"


def _ends(grammar: Grammar, wanted: WantedCalls) -> list[str]:
    """A rule for each tool's call. Schemas of tools that are not strict bind only where there must be calls."""
    free: Binding = "loose" if wanted.must else "free"
    return [
        call_end(grammar, tool, wanted.form, "exact" if tool.function.strict else free, f"tools[{i}]")
        for i, tool in enumerate(wanted.tools)
    ]
