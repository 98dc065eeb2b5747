"""What a checkpoint's text files mean, against transformers reading the same files, and against hand-made cases."""

import json
import re
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path
from typing import Any

import jinja2.filters
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import NFC
from tokenizers.processors import TemplateProcessing

from copyengine.wire.errors import ConfigError, RequestRefused
from scheduler.chat_template import ChatTemplate
from scheduler.protocol import Generate, Message
from scheduler.tokenize import COMPOSED_OF, exceeds, load_text_codec
from tests.scheduler.rig import CORPUS, train_tokenizer

TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- bos_token + '[' + messages[0].content | trim + ']' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + message.role) }}{% endif %}
    {% if message.role == 'assistant' %}
        {% generation %}
<a>{{ message.content }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
<u>{{ {'c': message.content, 'é': [1, 2]} | tojson }}
        {% if loop.index > 3 %}{% break %}{% endif %}
    {% endif %}
{%- endfor %}
{% if add_generation_prompt %}<a>{% endif %}
{{- '' if tools else '(no tools)' }}
"""
CHATS = [
    [{"role": "user", "content": "hi <b>&'"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": '日本 "q"\n'}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}] * 2,
]
ORACLE = """
import json, sys
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
chats = json.load(sys.stdin)
json.dump([tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
          + [tokenizer("the fox <|end|> x")["input_ids"]], sys.stdout)
"""


def write(directory: Path, post_processor: bool = False, **files: Any) -> Path:
    tokenizer = train_tokenizer(CORPUS)
    if post_processor:
        start = tokenizer.token_to_id("<|start|>")
        tokenizer.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", start)])
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return directory


def messages(chat: list[dict[str, str]]) -> list[Message]:
    return [Message(m["role"], m["content"]) for m in chat]


def test_chats_and_prompts_read_as_transformers_reads_them(tmp_path: Path) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True},
        "chat_template": TEMPLATE,
    }
    write(tmp_path, post_processor=True, tokenizer_config=settings)
    codec = load_text_codec(tmp_path, {})
    oracle = subprocess.run(
        [sys.executable, "-c", ORACLE, str(tmp_path)],
        input=json.dumps(CHATS), capture_output=True, text=True, check=True, timeout=100, cwd=tmp_path,
    )  # fmt: skip
    *chats, ids = json.loads(oracle.stdout)
    assert codec.encode_prompt("the fox <|end|> x") == ids
    for chat, text in zip(CHATS, chats, strict=True):
        assert codec.chat_template is not None
        assert codec.chat_template.render(chat) == text
        tokenizer = codec._text_tokenizer()
        assert codec.encode_chat(messages(chat)) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages.append(1) }}", "safe"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ '\\ud800' }}", "surrogates"),
        ("{{ raise_exception('\\ud800') }}", r"\\ud800"),
        ("{{ [].pop() }}", "safe"),
        (
            "{% set r = namespace(x=1.5) %}{% for i in range(9) %}{% set r.x = r.x * 1e99 %}{% endfor %}{{ r.x|int }}",
            "inf",
        ),
        ("{{ 2 ** 65536 }}", "bits"),
        ("{{ 'ab' * 500001 }}", "1,000,000"),
        ("{{ 500001 * [1, 2] }}", "1,000,000"),
        ("{{ 'a'|center(10 ** 18) }}", "center is asked for more"),
    ],
)
def test_a_template_that_objects_refuses_one_request(tmp_path: Path, template: str, named: str) -> None:
    codec = load_text_codec(write(tmp_path, tokenizer_config={"chat_template": template}), {})
    with pytest.raises(RequestRefused, match=named) as refused:
        codec.encode_chat([Message("user", "hi")])
    assert refused.value.code == "invalid_request"
    refused.value.detail.encode()


def test_what_a_template_says_is_cut(tmp_path: Path) -> None:
    """Against the bound: the words may be the client's whole message."""
    template = "{{ raise_exception(messages[0].content) }}"
    codec = load_text_codec(write(tmp_path, tokenizer_config={"chat_template": template}), {})
    with pytest.raises(RequestRefused) as refused:
        codec.encode_chat([Message("user", "x" * 5000)])
    assert 500 <= len(refused.value.detail) < 600


def test_nothing_of_a_template_is_evaluated_before_it_is_rendered() -> None:
    """Against a filter that counts its calls; and arithmetic that would hold up the process for good."""
    ChatTemplate("{{ 9 ** (9 ** 9) }}{{ 'ab' * 9 ** 12 }}{% if 9 ** 9 ** 9 %}{% endif %}", {}, "x")
    calls: list[str] = []

    def upper(text: str) -> str:
        calls.append(text)
        return "seen"

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(jinja2.filters.FILTERS, "upper", upper)
        template = ChatTemplate("{{ 'a'|upper }}{% set x = 'a'|upper %}{{ x }}", {}, "x")
        assert calls == []
        assert template.render([]) == "seenseen" and calls == ["a", "a"]


@pytest.mark.parametrize(
    "expression", ["3 * 4", "2 ** 10", "2 ** -1", "'-' * 20", "2 * [1]", "1.5 * 2", "0 ** 0", "(-3) ** 3"]
)
def test_ordinary_arithmetic_is_what_python_makes_of_it(expression: str) -> None:
    assert ChatTemplate("{{ " + expression + " }}", {}, "x").render([]) == str(eval(expression))


def test_where_a_template_is_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "from list"}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    hi = [{"role": "user", "content": "hi"}]
    codec = load_text_codec(tmp_path, {})
    assert codec.chat_template is not None and codec.chat_template.render(hi) == "from list"
    (tmp_path / "chat_template.jinja").write_text("from file {{ strftime_now('%Y')|length }}", "utf-8")
    codec = load_text_codec(tmp_path, {})
    assert codec.chat_template is not None and codec.chat_template.render(hi) == "from file 4"


@pytest.mark.parametrize(
    "value", [5, {"default": "x"}, ["x"], [{"name": ["x"], "template": "x"}], [{"name": "default", "template": 7}]]
)
def test_a_template_that_is_no_text_refuses_the_start(tmp_path: Path, value: Any) -> None:
    write(tmp_path, tokenizer_config={"chat_template": value})
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template"):
        load_text_codec(tmp_path, {})


def test_a_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    codec = load_text_codec(write(tmp_path), {})
    with pytest.raises(RequestRefused) as refused:
        codec.encode(Generate(messages=[Message("user", "hi")]))
    assert refused.value.code == "no_chat_template"


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        ({}, {}, {1}),
        ({"eos_token_id": 7}, {}, {1, 7}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {1, 7, 8}),
        ({"eos_token_id": 0}, {"eos_token_id": 9, "text_config": {"eos_token_id": 4}}, {0, 1}),
        ({}, {"eos_token_id": 9}, {1, 9}),
        ({"eos_token_id": []}, {"eos_token_id": 9}, {1, 9}),
        ({"eos_token_id": -1}, {"eos_token_id": 9}, {1, 9}),
        ({"eos_token_id": None}, {"eos_token_id": [2, 0]}, {0, 1, 2}),
        ({}, {"text_config": {"eos_token_id": 4}}, {1, 4}),
    ],
)
def test_what_ends_an_answer(tmp_path: Path, generation: dict[str, Any], config: dict[str, Any], eos: set[int]) -> None:
    """Against the rule: generation_config.json and the tokenizer; config.json only where the former is silent."""
    write(tmp_path, tokenizer_config={"eos_token": "<|end|>"}, generation_config=generation)
    assert load_text_codec(tmp_path, config).eos_token_ids == eos


def test_a_tokenizer_without_an_eos_token_adds_none(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"eos_token": "not in the vocabulary"}, generation_config={"eos_token_id": 7})
    assert load_text_codec(tmp_path, {"eos_token_id": 9}).eos_token_ids == {7}


@pytest.mark.parametrize("value", ["2", True, 2.0, [1, "2"], {"id": 2}])
def test_an_end_that_is_no_token_is_refused(tmp_path: Path, value: Any) -> None:
    write(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        load_text_codec(tmp_path, {})
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id"):
        load_text_codec(tmp_path, {"eos_token_id": value})


TEXT_FILES = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_file_that_is_there_but_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    """Bytes that are not UTF-8, a directory in its place, a link to itself."""
    write(tmp_path)
    path = tmp_path / name
    path.write_bytes(b'{"a": "\xff\xfe"}')
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}.*UTF-8"):
        load_text_codec(tmp_path, {})
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}.*not a regular file"):
        load_text_codec(tmp_path, {})
    path.rmdir()
    path.symlink_to(path)
    with pytest.raises(ConfigError, match=rf"{re.escape(str(path))}.*cannot be read"):
        load_text_codec(tmp_path, {})


def test_a_directory_without_a_tokenizer_serves_token_ids_only(tmp_path: Path) -> None:
    codec = load_text_codec(tmp_path, {"eos_token_id": 3})
    assert not codec.has_text
    assert codec.eos_token_ids == {3}
    assert codec.encode(Generate(token_ids=[1, 2])) == [1, 2]
    for generate in (Generate(prompt="a"), Generate(messages=[Message("user", "a")])):
        with pytest.raises(RequestRefused) as refused:
            codec.encode(generate)
        assert refused.value.code == "no_tokenizer"
    detokenizer = codec.detokenizer()
    assert detokenizer.push(5) + detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "[1]"),
        ("generation_config.json", "{,"),
        ("generation_config.json", "[" * 100_000),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}'),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("chat_template.jinja", "{% if %}"),
        ("chat_template.jinja", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"),
        ("chat_template.jinja", "{% for a in b %}" * 25 + "{% endfor %}" * 25),
        ("chat_template.jinja", "{% if a %}" * 300 + "{% endif %}" * 300),
        ("chat_template.jinja", "{{ " + "9" * 5000 + " }}"),
    ],
)
def test_a_damaged_file_refuses_the_start(tmp_path: Path, name: str, content: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(ConfigError, match=re.escape(name)):
        load_text_codec(tmp_path, {})


def test_text_that_cannot_fit_is_refused_before_it_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the longest token of the vocabulary, repeated: that fits exactly, one character more does not."""
    codec = load_text_codec(write(tmp_path, tokenizer_config={"chat_template": "{{ messages[0].content }}"}), {})
    assert max(map(len, codec._text_tokenizer().get_vocab())) == len("0123456789")
    fits = "0123456789" * 7
    assert len(codec.encode(Generate(prompt=fits), 7)) == len(codec.encode(Generate(prompt=fits))) == 7
    monkeypatch.setattr(codec, "_tokenizer", object())  # nothing may be asked of it
    for generate in (Generate(prompt=fits + "x"), Generate(messages=[Message("user", fits + "x")])):
        with pytest.raises(RequestRefused, match=rf"{len(fits) + 1} characters.* 7 tokens.* {len(fits)} ") as refused:
            codec.encode(generate, 7)
        assert refused.value.code == "context_length_exceeded"


def test_text_is_measured_as_the_normaliser_leaves_it(tmp_path: Path) -> None:
    """Against the same text, composed: 150 characters of four parts each, where 400 fit."""
    write(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.normalizer = NFC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = load_text_codec(tmp_path, {})
    composed = "\u1f82" * 150
    parts = unicodedata.normalize("NFD", composed)
    assert len(parts) == 600
    assert codec.encode(Generate(prompt=parts), 40) == codec.encode(Generate(prompt=composed), 40)
    for too_long in ("x" * 404, parts + "x" * 254, parts * 3):
        with pytest.raises(RequestRefused, match=f"{len(too_long)} characters.* 40 tokens.* 400 "):
            codec.encode(Generate(prompt=too_long), 40)


@given(
    text=st.text(st.sampled_from("ae\u0301\u0308\u0345\u0313\u0300\u03b1\u1100\u1161\u11a8가"), max_size=60),
    bound=st.integers(0, 60),
    piece_chars=st.integers(1, 20),
)
def test_no_text_is_too_long_that_fits_when_composed(text: str, bound: int, piece_chars: int) -> None:
    """Against Python's own normalisation, wherever it is cut; and what is too long by more than cuts forgive is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scheduler.tokenize.PIECE_CHARS", piece_chars)
        too_long = exceeds(text, bound, NFC())
    chars = len(unicodedata.normalize("NFC", text))
    forgiven = (COMPOSED_OF - 1) * -(-len(text) // piece_chars)
    assert not (too_long and chars <= bound) and (too_long or chars <= bound + forgiven)
    assert exceeds(text, bound, None) == (len(text) > bound)


def test_no_character_is_composed_of_more() -> None:
    """Against every character that there is."""
    characters = map(chr, range(sys.maxunicode + 1))
    parts = ((unicodedata.normalize("NFD", one), one) for one in characters)
    assert max(len(many) for many, one in parts if unicodedata.normalize("NFC", many) == one) == COMPOSED_OF


def test_encoding_lets_other_threads_go_on(tmp_path: Path) -> None:
    """Against a thread that counts: `Tokenizer.encode` would let it count to one or two."""
    codec = load_text_codec(write(tmp_path), {})
    text = " ".join(CORPUS) * 10_000
    ticks = 0
    over = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    codec.encode_prompt(text)
    over.set()
    thread.join()
    assert ticks > 20


def test_text_that_the_tokenizer_cannot_encode_refuses_one_request(tmp_path: Path) -> None:
    Tokenizer(WordLevel({"a": 0}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestRefused, match="tokenizer") as refused:
        load_text_codec(tmp_path, {}).encode_prompt("b")
    assert refused.value.code == "invalid_request"


def test_a_tokenizer_that_falls_over_refuses_one_request(tmp_path: Path) -> None:
    """Against an error of the library's that is no Exception: nobody would hear of it."""
    write(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    tokenizer["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    tokenizer["decoder"] = {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    codec = load_text_codec(tmp_path, {})
    with pytest.raises(RequestRefused, match="chunk size must be non-zero"):
        codec.encode_prompt("a")
    letter = tokenizer["model"]["vocab"]["a"]
    with pytest.raises(RequestRefused, match="cannot decode them: index out of bounds"):
        codec.decode([letter])
    detokenizer = codec.detokenizer()
    assert detokenizer.push(letter) == "" and detokenizer.fault.startswith("index out of bounds")


def test_a_tokenizer_file_that_the_library_falls_over_refuses_the_start(tmp_path: Path) -> None:
    write(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    tokenizer["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read: Precompiled"):
        load_text_codec(tmp_path, {})
