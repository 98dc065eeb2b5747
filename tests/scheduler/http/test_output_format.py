"""Grammars, compiled by llguidance over tokenizers of each kind: what they let through, and what comes of drawing from
them, against hand-written answers, the parsers of calls, and a validator of JSON schemas."""

import json
import random
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from scheduler.http.chat_requests import FunctionTool, JsonSchemaFormat, ResponseFormat, Tool
from scheduler.http.errors import ApiError
from scheduler.http.lark import Grammar, literal
from scheduler.http.output_format import Thinking, WantedCalls, answer_grammar, answer_schema
from scheduler.http.reasoning import ReasoningSplitter
from scheduler.http.tool_calls import CallForm
from scheduler.http.tool_calls_json import JsonToolCalls
from scheduler.http.tool_calls_xml import XmlToolCalls
from scheduler.http.tool_schema import ToolSchema
from scheduler.tokenize import MARKERS
from tests.scheduler.http.read_calls import whole_calls
from tests.scheduler.rig import CORPUS, EOS_TEXT, train_tokenizer

FORMS: list[CallForm] = ["json", "xml"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}


class Text:
    """A tokenizer, with the markers as tokens of their own or without, and llguidance's over it."""

    def __init__(self, added: bool) -> None:
        self.tokenizer: Tokenizer = train_tokenizer(CORPUS)
        self.tokens: dict[str, int] = {}
        if added:
            self.tokenizer.add_tokens(list(MARKERS))
            self.tokens = {text: i for text in MARKERS if (i := self.tokenizer.token_to_id(text)) is not None}
        self.eos = self.tokenizer.token_to_id(EOS_TEXT)
        self.guide = LLTokenizer(self.tokenizer.to_str(), eos_token=self.eos)

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.guide, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def matches(self, grammar: str, text: str) -> bool:
        """Whether the whole text is an answer."""
        matcher = self.matcher(grammar)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def drawn(self, grammar: str, seed: int, most: int = 400) -> str | None:
        """An answer by chance, as a model without sense draws it; None if it has no end within `most` tokens."""
        matcher, dice = self.matcher(grammar), random.Random(seed)
        ids: list[int] = []
        while not matcher.is_stopped() and len(ids) < most:
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(self.guide.vocab_size) if mask[i // 8] >> i % 8 & 1]
            # markers and ends of strings would else hardly ever come, of some hundred tokens
            ends = [i for i in allowed if i == self.eos or self.tokenizer.decode([i])[:1] in ('"', "<", "\n", "}")]
            token = dice.choice(ends if ends and dice.random() < 0.4 else allowed)
            if token == self.eos:
                break
            matcher.consume_token(token)
            ids.append(token)
        return self.tokenizer.decode(ids, skip_special_tokens=False) if matcher.is_accepting() else None


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def text(request: pytest.FixtureRequest) -> Text:
    return Text(request.param)


def tool(name: str, parameters: dict[str, Any] | None = None, strict: bool | None = None) -> Tool:
    return Tool(FunctionTool(name, None, parameters, strict))


def json_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml_call(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def test_which_schema_an_answer_has() -> None:
    assert answer_schema(None) is None and answer_schema(ResponseFormat("text")) is None
    assert answer_schema(ResponseFormat("json_object")) == {"type": "object"}
    assert answer_schema(ResponseFormat("json_schema", JsonSchemaFormat(schema=SCHEMA))) == SCHEMA
    with pytest.raises(ApiError, match="no schema"):
        answer_schema(ResponseFormat("json_schema"))
    with pytest.raises(ApiError, match="x-guidance"):
        answer_schema(ResponseFormat("json_schema", JsonSchemaFormat(schema={"x-guidance": {"lenient": True}})))


def test_what_is_free_has_no_grammar() -> None:
    assert answer_grammar(None, None, "may", {}) == ""
    assert answer_grammar(None, WantedCalls([tool("f", SCHEMA)], "json", must=False, several=True), "may", {}) == ""


@pytest.mark.parametrize(
    ("thinking", "answer", "matches"),
    [
        ("never", '{"a": 1}', True),
        ("never", '{"a":1,\n  "b": "x"}', True),
        ("never", '{"a": 1}\n', False),
        ("never", '{"b": "x"}', False),
        ("never", '{"a": 1, "b": "z"}', False),
        ("never", '<think>so</think>{"a": 1}', False),
        ("may", '{"a": 1}', True),
        ("may", '<think>so {"b"}\n</think>\n\n{"a": 1}', True),
        ("may", 'so</think>{"a": 1}', False),
        ("opened", 'so <tool_call> <think>\n</tool_call></think>\n\n{"a": 1}', True),
        ("opened", '</think>{"a": 1}', True),
        ("opened", '{"a": 1}', False),
        ("opened", "so</think>no", False),
        ("opened", 'so</think>\n\n\n\n\n{"a": 1}', False),
    ],
)
def test_json_after_thinking(text: Text, thinking: Thinking, answer: str, matches: bool) -> None:
    assert text.matches(answer_grammar(SCHEMA, None, thinking, text.tokens), answer) is matches


@pytest.mark.parametrize(
    ("must", "several", "answer", "matches"),
    [
        (True, True, json_call("f", '{"a": 1}'), True),
        (True, True, json_call("g", "{}"), True),
        (True, True, json_call("g", '{"any": ["thing"]}') + "\n" + json_call("f", '{"a": 1}'), True),
        (True, False, json_call("g", "{}") + "\n" + json_call("g", "{}"), False),
        (True, True, json_call("f", "{}"), False),
        (True, True, json_call("h", "{}"), False),
        (True, True, "hello", False),
        (True, True, "<think>f</think>\n\n" + json_call("f", '{"a": 1}'), True),
        (False, False, "hello", True),
        (False, False, "<think>f</think>\n\nhello", True),
        (False, False, "hello\n" + json_call("f", '{"whatever": 1}'), True),
        (False, False, "hello\n" + json_call("g", "{}") + json_call("g", "{}"), False),
        (False, False, "hello\n" + json_call("h", "{}"), False),
    ],
)
def test_calls_as_json(text: Text, must: bool, several: bool, answer: str, matches: bool) -> None:
    wanted = WantedCalls([tool("f", SCHEMA), tool("g")], "json", must, several)
    assert text.matches(answer_grammar(None, wanted, "may", text.tokens), answer) is matches


def test_arguments_are_an_object_whatever_the_schema_leaves_open(text: Text) -> None:
    grammar = answer_grammar(
        None, WantedCalls([tool("f", {"required": ["a"]})], "json", True, False), "never", text.tokens
    )
    assert text.matches(grammar, json_call("f", '{"a": 1}')) and not text.matches(grammar, json_call("f", "5"))
    with pytest.raises(ApiError, match="no schema of an object"):
        answer_grammar(None, WantedCalls([tool("f", {"type": ["null", "array"]})], "json", True, False), "never", {})


def test_a_strict_tool_binds_calls_among_text(text: Text) -> None:
    wanted = WantedCalls([tool("f", SCHEMA, True), tool("g", SCHEMA)], "json", must=False, several=True)
    grammar = answer_grammar(None, wanted, "opened", text.tokens)
    for answer, matches in (
        ("so</think>hello", True),
        ("so</think>hello " + json_call("f", '{"a": 1}') + "\n" + json_call("g", '{"c": 1}') + "\nso", True),
        ("so " + json_call("f", "{}") + "</think>" + json_call("f", '{"a": 1}'), True),
        ("so</think>" + json_call("f", "{}"), False),
        ("so</think>" + json_call("g", "[]"), False),
    ):
        assert text.matches(grammar, answer) is matches, answer


def test_json_or_calls(text: Text) -> None:
    grammar = answer_grammar(SCHEMA, WantedCalls([tool("f", SCHEMA)], "json", False, True), "may", text.tokens)
    for answer, matches in (
        ('{"a": 1}', True),
        (json_call("f", '{"c": 1}'), True),
        ("hello", False),
        ('{"c": 1}', False),
    ):
        assert text.matches(grammar, answer) is matches, answer


XML_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 2, "maxLength": 5},
        "free": {"type": "string"},
        "kind": {"type": "string", "enum": ["a b", "\"c\""]},
        "count": {"$ref": "#/$defs/count"},
        "maybe": {"type": ["string", "null"]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/count"}, "maxItems": 2},
    },
    "required": ["text", "count"],
    "$defs": {"count": {"type": "integer", "minimum": 3}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "matches"),
    [
        ({"text": "ab", "count": "3"}, True),
        (
            {"text": "ab\n\n", "free": "<p>\n</p>", "kind": '"c"', "count": "12", "maybe": "null", "list": "[3, 4]"},
            True,
        ),
        ({"text": "abcdef", "count": "3"}, False),
        ({"text": "a", "count": "3"}, False),
        ({"text": "a</parameter>", "count": "3"}, False),
        ({"text": "ab", "count": "2"}, False),
        ({"text": "ab", "count": "3", "other": "x"}, False),
        ({"text": "ab", "kind": "c", "count": "3"}, False),
        ({"text": "ab", "count": "3", "list": "[3, 3, 3]"}, False),
        ({"text": "ab"}, False),
    ],
)
def test_calls_as_xml(text: Text, values: dict[str, str], matches: bool) -> None:
    for strict in (True, False):
        wanted = WantedCalls([tool("g"), tool("f", XML_SCHEMA, strict)], "xml", True, True)
        grammar = answer_grammar(None, wanted, "never", text.tokens)
        assert text.matches(grammar, xml_call("f", **values)) is matches
        assert text.matches(grammar, xml_call("g") + "\n" + xml_call("f", **values)) is matches


def test_tools_that_are_not_strict_may_be_called_otherwise_among_text(text: Text) -> None:
    wanted = WantedCalls([tool("g", strict=True), tool("f", XML_SCHEMA)], "xml", False, True)
    grammar = answer_grammar(None, wanted, "never", text.tokens)
    assert text.matches(grammar, "hello " + xml_call("f", other="x", text="a") + " so")
    assert not text.matches(grammar, "hello " + xml_call("g", other="x"))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"anyOf": [{}]}, "parameters: anyOf"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, r"parameters\.properties\.a: pattern"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, r"parameters\.properties\.a: format"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": 1}]}}}, r"\.a: anyOf"),
        ({"properties": {"a>": {}}}, "names of parameters"),
        ({"type": "string"}, "no schema of an object"),
        ({"properties": []}, "properties is no object"),
        ({"properties": {"a": 5}}, "a is no object"),
        ({"required": 5}, "required"),
        ({"properties": {"a": {"type": "string", "enum": 5}}}, "enum is no list"),
        ({"properties": {"a": {"type": "string", "minLength": "5"}}}, "minLength"),
    ],
)  # fmt: skip
def test_what_xml_cannot_enforce_is_refused_by_name(schema: dict[str, Any], named: str) -> None:
    wanted = WantedCalls([tool("f"), tool("g", schema, True)], "xml", True, True)
    with pytest.raises(ApiError, match=named) as refused:
        answer_grammar(None, wanted, "never", {})
    assert "tools[1].function" in refused.value.body.error.message and refused.value.body.error.param == "tools"


def test_text_that_cannot_be_bound_is_free_where_a_tool_is_not_strict(text: Text) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "x", "maxLength": 3}}, "required": ["a"]}
    grammar = answer_grammar(None, WantedCalls([tool("f", schema)], "xml", True, True), "never", text.tokens)
    assert text.matches(grammar, xml_call("f", a="abc")) and not text.matches(grammar, xml_call("f", a="abcd"))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/none"},
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"properties": {"a": {"$ref": "file:///etc/x"}}},
        {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}},
        {"properties": {"a": {"type": "text"}}},
        {"properties": {"a": {"type": ["string", 1]}}},
    ],
)
def test_a_strict_tool_whose_schema_binds_nothing_is_refused(schema: dict[str, Any]) -> None:
    """A reference to nothing or to itself, and a type that there is none of."""
    for must in (True, False):
        with pytest.raises(ApiError, match=r"tools\[0\]") as refused:
            answer_grammar(None, WantedCalls([tool("f", schema, True)], "xml", must, True), "never", {})
        assert refused.value.body.error.code == "unsupported_schema"


def test_a_grammar_does_not_outgrow_what_the_engine_takes() -> None:
    """Many parameters beside a large definition, which each one's JSON may refer to: 100 MB, were it made."""
    schema = {
        "properties": {f"p{i}": {"$ref": "#/$defs/large"} for i in range(1000)},
        "$defs": {"large": {"type": "array", "items": {"enum": ["x" * 100] * 1000}}},
    }
    with pytest.raises(ApiError, match="a grammar of more than") as refused:
        answer_grammar(None, WantedCalls([tool("f", schema)], "xml", True, True), "never", {})
    assert refused.value.body.error.code == "invalid_grammar"


@pytest.mark.parametrize("form", FORMS)
def test_what_is_drawn_is_read_as_calls_whose_arguments_validate(text: Text, form: CallForm) -> None:
    """Round trip over answers by chance; where chance finds the markers, with thinking and text before the calls."""
    valid = jsonschema_rs.validator_for(XML_SCHEMA)
    thinking: Thinking = "opened" if text.tokens else "never"
    ended = 0
    for seed in range(30):
        must = seed % 2 == 0 or not text.tokens
        wanted = WantedCalls([tool("f", XML_SCHEMA, True)], form, must, seed % 3 == 0)
        answer = text.drawn(answer_grammar(None, wanted, thinking, text.tokens), seed)
        if answer is None:
            continue
        splitter = ReasoningSplitter(thinking == "opened")
        said = splitter.push(answer).content + splitter.flush().content
        reader = JsonToolCalls() if form == "json" else XmlToolCalls({"f": ToolSchema(XML_SCHEMA).arguments()})
        content, calls = whole_calls(reader.push(said) + reader.flush())
        assert (not content and calls) or not must, answer
        assert "<tool_call>" not in content
        for name, arguments in calls:
            assert name == "f"
            valid.validate(json.loads(arguments))
        ended += bool(calls)
    assert ended >= 5


@pytest.mark.parametrize("seed", range(6))
def test_what_is_drawn_validates(text: Text, seed: int) -> None:
    answer = text.drawn(answer_grammar(SCHEMA, None, "never", text.tokens), seed, most=2000)
    assert answer is not None
    jsonschema_rs.validate(SCHEMA, json.loads(answer))


@pytest.mark.parametrize("words", ['a "b" \\n', "\n\t\\", "é 🦊 /x/ <a> [^b]", "</think>"])
def test_any_text_can_be_written_into_a_grammar(words: str) -> None:
    """Against the text itself, and itself changed."""
    text = Text(added=False)
    assert text.matches(Grammar({}).source(literal(words)), words)
    assert not text.matches(Grammar({}).source(literal(words)), words + "x")
    grammar = Grammar({})
    assert text.matches(grammar.source(grammar.up_to(words)), "before " + words)
    assert not text.matches(grammar.source(grammar.up_to(words)), words + words)


def test_a_tools_name_is_none_that_could_break_out_of_a_grammar() -> None:
    for name in ("", "a b", 'a"', "a>", "a\n", "a" * 129, "é"):
        with pytest.raises(msgspec.ValidationError, match="name"):
            msgspec.convert({"name": name}, FunctionTool)
