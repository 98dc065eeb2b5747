"""Calls found in text, against hand-written ones, against what calls were written from, and cut anywhere."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.http.markers import LAYOUT_CHARS
from scheduler.http.tool_calls import CallArguments, CallBegan, Content, ToolCallParser, call_form
from scheduler.http.tool_calls_json import WHOLE_CHARS, JsonToolCalls, ObjectEnd
from scheduler.http.tool_calls_xml import XmlToolCalls
from scheduler.http.tool_schema import ToolSchema
from tests.scheduler.chat_templates import JSON_CALLS, XML_CALLS
from tests.scheduler.http.cuts import cut, cuts, texts_of
from tests.scheduler.http.read_calls import whole_calls

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "on": {"type": "boolean"},
        "none": {"type": ["string", "null"]},
        "word": {"enum": ["5", 7, "null", None]},
        "list": {"type": "array"},
        "point": {"$ref": "#/$defs/point"},
        "either": {"anyOf": [{"type": "integer"}, {"type": "object"}]},
    },
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}}},
}
ARGUMENTS = {"f": ToolSchema(SCHEMA).arguments(), "g": {}}


def parser(form: str) -> ToolCallParser:
    return JsonToolCalls() if form == "json" else XmlToolCalls(ARGUMENTS)


def parse(form: str, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    reader = parser(form)
    return whole_calls([event for piece in pieces for event in reader.push(piece)] + reader.flush())


def test_the_form_is_that_of_the_template() -> None:
    assert (call_form(JSON_CALLS), call_form(XML_CALLS), call_form("{{ messages }}")) == ("json", "xml", None)


F1 = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("hello \n", "hello \n", []),
        (F1, "", [("f", '{"a": 1}')]),
        (f"\n\n{F1}\n", "", [("f", '{"a": 1}')]),
        (f"I look. \n{F1}\n{G}", "I look.", [("f", '{"a": 1}'), ("g", "{}")]),
        (f"{F1} and\n{G} so ", " and so ", [("f", '{"a": 1}'), ("g", "{}")]),
        ('<tool_call>{"name":"f","arguments":{"s":"}</tool_call>"}}</tool_call>', "", [("f", '{"s":"}</tool_call>"}')]),
        ('<tool_call>{"name": "f", "arguments": {"s": "\\"}"}}', "", [("f", '{"s": "\\"}"}')]),
        ('<tool_call>{"arguments": {"é": 1}, "name": "f"}</tool_call>', "", [("f", '{"é": 1}')]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        # cut off: what is there
        ('<tool_call>{"name": "f", "arguments": {"a": [1', "", [("f", '{"a": [1')]),
        ('a<tool_call>{"name": "f", "arg', 'a<tool_call>{"name": "f", "arg', []),
        ("a <tool_ca", "a <tool_ca", []),
        # no calls
        ("<tool_call>none</tool_call> ", "<tool_call>none</tool_call> ", []),
        ('<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
        ('<tool_call>{"name": "", "arguments": {}}', '<tool_call>{"name": "", "arguments": {}}', []),
        ('<tool_call>{"name": "f", "arguments": 5}', '<tool_call>{"name": "f", "arguments": 5}', []),
        ('<tool_call>{"name": "</tool_call>", "arguments": ', '<tool_call>{"name": "</tool_call>", "arguments": ', []),
        (f"<tool_call>\n{F1}", "<tool_call>", [("f", '{"a": 1}')]),
        ('<tool_call>{"a' + F1, '<tool_call>{"a', [("f", '{"a": 1}')]),
        ('<tool_call>{"arguments": {"s": "<tool_call>"}, "name": "f"}', "", [("f", '{"s": "<tool_call>"}')]),
        # wrong after the name: the rest is content
        ('<tool_call>{"name": "f", "arguments": {"a": x}}', "x}}", [("f", '{"a": ')]),
        ('<tool_call>{"name": "f", "arguments": {}, "id": 2}</tool_call>', ', "id": 2}</tool_call>', [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>!', "!", [("f", '{"a": 1}')]),
    ],
)  # fmt: skip
def test_calls_as_json(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse("json", text) == (content, calls)
    assert parse("json", *text) == (content, calls)


def xml(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (xml("g"), "", [("g", {})]),
        (f"Look.\n{xml('f', text='a', count='5')}\n{xml('g')}", "Look.", [("f", {"text": "a", "count": 5}), ("g", {})]),
        (xml("f", text=""), "", [("f", {"text": ""})]),
        ("<tool_call><function=f><parameter=text>a</parameter></function></tool_call>", "", [("f", {"text": "a"})]),
        ("<tool_call>\n<function=f>\n<parameter=text>\n</parameter>\n</function>", "", [("f", {"text": ""})]),
        (xml("f", text="\n a\n\n"), "", [("f", {"text": "\n a\n\n"})]),
        (xml("f", text='5 "é"\\\n{'), "", [("f", {"text": '5 "é"\\\n{'})]),
        (xml("f", text="<p>\n</parameter>x\n</function>"), "", [("f", {"text": "<p>\n</parameter>x\n</function>"})]),
        (xml("f", count=" 5 ", share="0.5", on="True"), "", [("f", {"count": 5, "share": 0.5, "on": True})]),
        (xml("f", none="None", list="[1, 2]"), "", [("f", {"none": None, "list": [1, 2]})]),
        (xml("f", point='{"x": 1}'), "", [("f", {"point": {"x": 1}})]),
        (xml("f", word="5"), "", [("f", {"word": "5"})]),
        (xml("f", word="7"), "", [("f", {"word": 7})]),
        (xml("f", none="null", either="7"), "", [("f", {"none": None, "either": 7})]),
        (xml("f", none="5", either='{"a": 1}'), "", [("f", {"none": "5", "either": {"a": 1}})]),
        # no JSON of their type, or of none that is known: strings
        (xml("f", count="five", share="NaN", on="yes"), "", [("f", {"count": "five", "share": "NaN", "on": "yes"})]),
        (xml("f", list="[1", other="5"), "", [("f", {"list": "[1", "other": "5"})]),
        (xml("h", text="5"), "", [("h", {"text": "5"})]),
        # the end of function or call missing
        ("<tool_call>\n<function=g>\n</function>", "", [("g", {})]),
        ("<tool_call>\n<function=g>\n</tool_call>!", "!", [("g", {})]),
        # no calls
        ("<tool_call>\n{}</tool_call>", "<tool_call>\n{}</tool_call>", []),
        ("<tool_call>\n<function=", "<tool_call>\n<function=", []),
        ("<tool_call><function=>", "<tool_call><function=>", []),
        (f"<tool_call>{'<function=' + 'a' * 257 + '>'}", f"<tool_call>{'<function=' + 'a' * 257 + '>'}", []),
        # wrong after the name: the rest is content
        ("<tool_call><function=g>\nso</function></tool_call>", "\nso</function></tool_call>", [("g", {})]),
    ],
)  # fmt: skip
def test_calls_as_xml(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    for pieces in ([text], list(text)):
        said, found = parse("xml", *pieces)
        assert (said, [(name, json.loads(arguments)) for name, arguments in found]) == (content, calls)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tool_call><function=f><parameter=text>\nab\ncd\n", '{"text": "ab\\ncd\\n'),
        ("<tool_call><function=f><parameter=text>\nab\n</param", '{"text": "ab\\n</param'),
        ("<tool_call><function=f><parameter=text>\nab\n</parameter>\n", '{"text": "ab"'),
        ('<tool_call><function=f><parameter=list>\n["a', '{"list": ["a'),
        ("<tool_call><function=f><parameter=li", "{"),
    ],
)
def test_a_call_that_is_cut_off_keeps_what_it_has(text: str, arguments: str) -> None:
    assert parse("xml", text) == parse("xml", *text) == ("", [("f", arguments)])


JSON_TEXTS = texts_of(
    F1, G, '<tool_call>{"name": "f", "arguments": {"a": ["', "<tool_call>", "</tool_call>", '"name": "'
)
XML_TEXTS = texts_of(
    xml("f", text="a", count="5"), "<tool_call>", "\n<function=f>", "<parameter=text>", "<parameter=list>",
    "\n</parameter>", "</function>", "</tool_call>", "[1]",
)  # fmt: skip


@given(JSON_TEXTS, cuts())
def test_cuts_do_not_matter_to_json(text: str, places: list[int]) -> None:
    whole = parse("json", text)
    assert parse("json", *cut(text, places)) == whole
    if not whole[1]:
        assert whole[0] == text


@given(XML_TEXTS, cuts())
def test_cuts_do_not_matter_to_xml(text: str, places: list[int]) -> None:
    whole = parse("xml", text)
    assert parse("xml", *cut(text, places)) == whole
    if not whole[1]:
        assert whole[0] == text


NAMES = st.text(st.sampled_from("abc_1-."), min_size=1, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=3)


@given(CALLS, cuts())
def test_what_is_written_as_json_is_read(calls: list[tuple[str, dict[str, Any]]], places: list[int]) -> None:
    """Round trip."""
    bodies = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    text = "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    content, found = parse("json", *cut(text, places))
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in found] == calls


@given(CALLS, cuts())
def test_what_is_written_as_xml_is_read(calls: list[tuple[str, dict[str, Any]]], places: list[int]) -> None:
    """Round trip, with schemas that say of each argument what it is."""
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    calls = [(f"{name}{i}", arguments) for i, (name, arguments) in enumerate(calls)]
    tools = {
        name: {"properties": {key: {"type": names.get(type(value), "object")} for key, value in arguments.items()}}
        for name, arguments in calls
    }
    written = [
        xml(name, **{k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()})
        for name, arguments in calls
    ]
    reader = XmlToolCalls({name: ToolSchema(schema).arguments() for name, schema in tools.items()})
    events = [event for piece in cut("\n".join(written), places) for event in reader.push(piece)] + reader.flush()
    content, found = whole_calls(events)
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize(
    ("form", "prose", "said"),
    [
        ("json", "Write <tool_call> b", "Write <tool_call> b"),
        ("json", "Write <tool_call>{nam", "Write <tool_call>{nam"),
        ("json", "Write <tool_call>\n<", "Write <tool_call>"),
        ("json", f"<tool_call>{' ' * LAYOUT_CHARS} ", "<tool_call>"),
        ("json", '<tool_call>{"' + "a" * (WHOLE_CHARS - 2), '<tool_call>{"' + "a" * (WHOLE_CHARS - 2)),
        ("xml", "Write <tool_call> b", "Write <tool_call> b"),
        ("xml", f"<tool_call>{' ' * LAYOUT_CHARS} ", "<tool_call>"),
    ],
)
def test_what_is_no_call_is_not_held(form: str, prose: str, said: str) -> None:
    """Against the text so far: prose that names the marker comes out with the first character that no call has."""
    reader = parser(form)
    before = [event for character in prose[:-1] for event in reader.push(character)]
    assert whole_calls(before) == (prose.partition("<tool_call>")[0].rstrip(), [])
    assert whole_calls(before + reader.push(prose[-1])) == (said, [])
    rest = reader.push("and so on") + reader.flush()
    assert whole_calls([Content(said), *rest]) == (prose + "and so on", [])


@pytest.mark.parametrize("more", [False, True])
def test_how_many_blanks_stand_between_the_parts_of_a_call(more: bool) -> None:
    """Against what is written: one more than LAYOUT_CHARS, and what follows does not belong to the call."""
    gap = " " * (LAYOUT_CHARS + more)
    text = f"<tool_call><function=f><parameter=text>a</parameter>{gap}</function>"
    ended = '{"text": "a"}' if not more else f'{{"text": "a</parameter>{gap}</function>'
    assert parse("xml", text) == parse("xml", *text) == ("", [("f", ended)])
    for form, before, after, arguments in (
        ("xml", "<tool_call>", "<function=g></function>", "{}"),
        ("xml", "<tool_call><function=g>", "</function>", "{}"),
        ("xml", "<tool_call><function=g></function>", "</tool_call>", "{}"),
        ("json", "<tool_call>", '{"name": "g"}', "{}"),
        ("json", '<tool_call>{"name": "g", "arguments": {}', "}", "{}"),
        ("json", '<tool_call>{"name": "g", "arguments": {}}', "</tool_call>", "{}"),
    ):
        text = before + gap + after
        content, calls = parse(form, text)
        assert parse(form, *text) == (content, calls)
        assert content == ("" if not more else text if before == "<tool_call>" else gap + after)
        assert calls == ([] if more and before == "<tool_call>" else [("g", arguments)])


@pytest.mark.parametrize(
    "part", ["<tool_call>x", "<tool_call>", '<tool_call>{"', '<tool_call>{""', '<tool_call>{"n": [']
)
def test_what_is_no_call_is_scanned_a_few_times_only(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the text's length, however often the marker stands in it."""
    scanned = 0
    scan = ObjectEnd.scan

    def counted(self: ObjectEnd, text: str) -> int:
        nonlocal scanned
        count = scan(self, text)
        scanned += count + 1
        return count

    monkeypatch.setattr(ObjectEnd, "scan", counted)
    text = part * 2000
    assert parse("json", *text) == (text, [])
    assert scanned <= 3 * len(text)


def test_a_call_is_sent_while_it_arrives() -> None:
    """Against the events of each piece."""
    reader = JsonToolCalls()
    assert reader.push('Look:\n<tool_call>\n{"name": "f", "arguments": ') == [Content("Look:")]
    assert reader.push('{"a": "x') == [CallBegan(0, "f"), CallArguments(0, '{"a": "x')]
    assert reader.push('y"}') == [CallArguments(0, 'y"}')]
    xml_reader = XmlToolCalls(ARGUMENTS)
    assert xml_reader.push("<tool_call>\n<function=f>\n<parameter=te") == [CallBegan(0, "f"), CallArguments(0, "{")]
    assert xml_reader.push('xt>\nab"') == [CallArguments(0, '"text": "ab\\"')]
    assert xml_reader.push("\n</para") == []
    assert xml_reader.push("graph>") == [CallArguments(0, "\\n</paragraph>")]


@pytest.mark.parametrize("form", ["json", "xml"])
def test_deep_and_huge_values_are_no_exception(form: str) -> None:
    """Nesting beyond Python's recursion, and a number of more digits than Python converts."""
    for value in ("[" * 100_000, "[" * 50_000 + "]" * 50_000, "1" * 5000):
        text = f'<tool_call>{{"arguments": {{"a": {value}}}, "name": "f"}}</tool_call>'
        text = text if form == "json" else xml("f", list=value, count=value)
        content, calls = parse(form, text)
        assert (content == text and not calls) if form == "json" else (not content and len(calls) == 1)
