"""tokenizer.json, tokenizer_config.json and chat_template.jinja: a codec whose refusals are requests', or a refusal of
the start.

What takes all time or memory is tests/scheduler/test_text_trial.py's, in a process that is made for it.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from copyengine.wire.errors import ConfigError, RequestRefused
from scheduler.tokenize import TextCodec, load_text_codec
from tests.fuzz.source import Source, as_json, changed
from tests.scheduler.rig import CORPUS, train_tokenizer

BYTE_LEVEL: dict[str, Any] = json.loads(train_tokenizer(CORPUS, vocab_size=280).to_str())
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["▁", -2.0], ["<0x41>", -3.0]]}
WORDS = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "a": 1, "b": 2}}
SPM = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
SPLIT = {"type": "Split", "pattern": {"Regex": "a|b+"}, "behavior": "Isolated", "invert": False}
ADDED = {"id": 3, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
ADDED |= {"special": True}
NORMALIZER = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}]}
TOKENIZERS: list[dict[str, Any]] = [
    BYTE_LEVEL,
    {**BYTE_LEVEL, "normalizer": NORMALIZER},
    {**BYTE_LEVEL, "model": UNIGRAM, "pre_tokenizer": SPM, "decoder": SPM, "added_tokens": [ADDED]},
    {**BYTE_LEVEL, "model": WORDS, "pre_tokenizer": SPLIT, "decoder": {"type": "Fuse"}, "added_tokens": []},
]  # fmt: skip
SETTINGS = {"eos_token": {"content": "<|end|>"}, "bos_token": "<|start|>", "chat_template": "{{ messages[0].content }}"}
SNIPPETS = (
    *(
        "{{ ",
        " }}",
        "{% for i in range(3) %}",
        "{% endfor %}",
        "{% if ",
        " %}",
        "{% endif %}",
        "{% set x = ",
        "messages",
    ),
    *(
        "[0]",
        ".content",
        ".role",
        "|trim",
        "|tojson",
        "|length",
        "|join",
        "|map(attribute='content')",
        "|list",
        " ~ ",
        " + ",
    ),
    *(
        " * ",
        " ** ",
        "9",
        "99999999",
        "'a'",
        "''",
        "x",
        ".__class__",
        ".format(9)",
        "%s",
        " == ",
        " in ",
        "(",
        ")",
        "[",
        "]",
    ),
    *(
        "{% macro m(a) %}",
        "{% endmacro %}",
        "{{ m(1) }}",
        "namespace(a=1)",
        "tools",
        "raise_exception('x')",
        "loop.index",
    ),
    *(
        "{% generation %}",
        "{% endgeneration %}",
        "{% break %}",
        "{#",
        "#}",
        "{%-",
        "-%}",
        "|replace('a', 'bb')",
        "\n",
        "is defined",
    ),
)
CHAT = [{"role": "user", "content": "hi <x> a"}, {"role": "assistant", "content": "b"}]
TEXTS = ("a b <x>é", "aabb\n\n  1", "", "\u0301▁a\0")


def one_input(data: bytes) -> None:
    source = Source(data)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tokenizer = source.pick(TOKENIZERS)
        part = source.pick(("model", "normalizer", "pre_tokenizer", "decoder", "post_processor", "added_tokens"))
        if source.byte() < 128:
            tokenizer = {**tokenizer, part: changed(source, tokenizer[part])}
        if source.byte() < 200:
            (directory / "tokenizer.json").write_bytes(as_json(source, tokenizer))
        if source.byte() & 1:
            (directory / "tokenizer_config.json").write_bytes(as_json(source, changed(source, SETTINGS)))
        if source.byte() & 1:
            template = "".join(source.pick(SNIPPETS) for _ in range(source.byte() % 24))
            (directory / "chat_template.jinja").write_text(template, "utf-8")
        try:
            codec = load_text_codec(directory, {"eos_token_id": 1})
        except ConfigError as error:
            assert str(directory) in str(error) or "generation_config" in str(error)
            return
        _use(codec)


def _use(codec: TextCodec) -> None:
    for text in TEXTS:
        _refused_or_done(lambda text=text: codec.encode_prompt(text, 100))
    _refused_or_done(lambda: codec.decode([0, 1, 2]))
    detokenizer = codec.detokenizer()
    for token in (0, 1, 2, 3, 2**20):
        assert isinstance(detokenizer.push(token), str)
    assert isinstance(detokenizer.flush(), str)
    for continues in (False, True):
        _refused_or_done(lambda continues=continues: codec.template().render(CHAT, continue_final_message=continues))


def _refused_or_done(use: Any) -> None:
    try:
        use()
    except RequestRefused as refused:
        refused.detail.encode()
        assert len(refused.detail) < 3000
