"""Chats with tools as the chat template writes them, against transformers rendering the same ones."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from copyengine.wire.errors import RequestRefused
from scheduler.chat_template import ChatTemplate
from scheduler.tokenize import load_text_codec
from tests.scheduler.chat_templates import JSON_CALLS, XML_CALLS
from tests.scheduler.rig import CORPUS, train_tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells <the> weather & more",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Łódź", "Bern"]},
                    "days": {"type": "integer", "minimum": 1, "description": "how many"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": "be brief "}
ASKED = {"role": "user", "content": " How is it in Łódź? "}
CALLED = {
    "role": "assistant",
    "content": "Let me see.",
    "reasoning_content": "a call\n",
    "tool_calls": [call("weather", city="Łódź", days=2), call("now"), call("weather", city="B", more=[1, {"x": None}])],
}
TOLD = [{"role": "tool", "tool_call_id": "call_1", "content": text} for text in ("rain\n", '{"t": 3}')]
ANSWERED = {"role": "assistant", "content": "It <rains>  ", "reasoning_content": "done"}

CASES: list[dict[str, Any]] = [
    {"messages": [ASKED]},
    {"messages": [SYSTEM, ASKED], "tools": TOOLS},
    {"messages": [ASKED, CALLED, *TOLD], "tools": TOOLS, "enable_thinking": False},
    {"messages": [SYSTEM, ASKED, CALLED, *TOLD, ANSWERED, ASKED], "enable_thinking": True},
    {"messages": [ASKED, CALLED, TOLD[0], ANSWERED], "tools": TOOLS, "add_generation_prompt": False},
    {"messages": [ASKED, ANSWERED], "continue_final_message": True, "add_generation_prompt": False},
]
ORACLE = """
import json, sys
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
templates, cases = json.load(sys.stdin)
render = tokenizer.apply_chat_template
texts = [
    render(c.pop("messages"), chat_template=t, tokenize=False, **({"add_generation_prompt": True} | c))
    for t in templates for c in json.loads(json.dumps(cases))
]
json.dump(texts, sys.stdout)
"""


def test_chats_with_tools_read_as_transformers_reads_them(tmp_path: Path) -> None:
    train_tokenizer(CORPUS).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', "utf-8")
    done = subprocess.run(
        [sys.executable, "-I", "-c", ORACLE, str(tmp_path)],
        input=json.dumps([[JSON_CALLS, XML_CALLS], CASES]),
        capture_output=True, text=True, check=True, timeout=100, cwd=tmp_path,
    )  # fmt: skip
    ours = [ChatTemplate(source, {}, "x").render(**case) for source in (JSON_CALLS, XML_CALLS) for case in CASES]
    assert ours == json.loads(done.stdout)
    assert len(set(ours)) == len(ours)


def test_a_message_is_continued_where_the_template_leaves_its_end() -> None:
    """Against hand-written prompts: content kept as it is, trimmed, and left out."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b  "}]
    for printed, prompt in (("m.content", "a.b  "), ("m.content|trim", "a.b")):
        template = ChatTemplate("{% for m in messages %}{{ " + printed + " }}.{% endfor %}", {}, "x")
        assert template.render(chat, continue_final_message=True, add_generation_prompt=False) == prompt
    with pytest.raises(RequestRefused, match="continue_final_message") as refused:
        ChatTemplate("{{ messages[0].content }}", {}, "x").render(chat, continue_final_message=True)
    assert refused.value.code == "invalid_request"


def test_what_a_template_reads_is_known() -> None:
    """Against the templates by eye: what they are given, and nothing that they only mention, or set in any case."""
    given = {"messages", "tools", "add_generation_prompt", "enable_thinking"}
    assert ChatTemplate(XML_CALLS, {}, "x").variables == given
    assert ChatTemplate(JSON_CALLS, {}, "x").variables == given | {"thought"}
    source = """{% set a = b %}{# c #}{{ 'd' ~ bos_token }}{% for e in x.f %}{{ g(h=e) }}{{ loop.first }}{% endfor %}
    {% set n = namespace(k=1) %}{{ n.k ~ self ~ strftime_now('%Y') ~ messages }}
    {% macro m(p) %}{{ p ~ caller() }}{% endmacro %}{% generation %}{{ q }}{% endgeneration %}
    {% if s is not defined %}{% set s = 1 %}{% endif %}{{ s }}"""
    template = ChatTemplate(source, {"bos_token": "<s>"}, "x")
    assert template.settings == {"b", "x", "g", "q", "s"}
    assert template.variables == template.settings | {"bos_token", "messages"}


@pytest.mark.parametrize("special", [False, True])
def test_tokens_that_structure_an_answer_are_text(tmp_path: Path, special: bool) -> None:
    """Against the same answer by tokens that a tokenizer calls special or not; what else is special stays out."""
    tokenizer = train_tokenizer(CORPUS)
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(["<think>", "</think>", "<tool_call>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = load_text_codec(tmp_path, {})
    ids = codec.encode_rendered("<|start|><think>a</think>b<tool_call><|end|>")
    detokenizer = codec.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "<think>a</think>b<tool_call>"
    markers = ("<think>", "</think>", "<tool_call>")
    assert codec.added_tokens == {text: tokenizer.token_to_id(text) for text in markers}
