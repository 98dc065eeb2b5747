"""What a checkpoint directory says about text: tokenizer, chat template, end-of-sequence tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from copyengine.wire.errors import ConfigError, RequestRefused
from scheduler.chat_template import ChatTemplate
from scheduler.detokenize import Detokenizer, NoText
from scheduler.protocol import Generate, Message

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextCodec:
    """Turns prompts into tokens and tokens into text. Safe to use from several threads.

    `eos_token_ids` end an answer: those of generation_config.json, config.json and the tokenizer's eos_token.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None, eos_token_ids: frozenset[int]
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
        self._special = frozenset(token for token, entry in added.items() if entry.special)

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer at all."""
        return self._tokenizer is not None

    def encode(self, generate: Generate) -> list[int]:
        """Token ids of the one thing that `generate` states. RequestRefused if it is text and cannot be encoded."""
        if generate.prompt is not None:
            return self.encode_prompt(generate.prompt)
        if generate.messages is not None:
            return self.encode_chat(generate.messages)
        return generate.token_ids or []

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer's post-processor adds."""
        return self._encode(prompt, add_special_tokens=True)

    def encode_chat(self, messages: list[Message]) -> list[int]:
        """Token ids of the rendered chat, whose template writes its special tokens itself."""
        self._text_tokenizer()
        if self._chat_template is None:
            raise RequestRefused("no_chat_template", "this model has no chat template: send prompt or token_ids")
        text = self._chat_template.render([{"role": m.role, "content": m.content} for m in messages])
        return self._encode(text, add_special_tokens=False)

    def detokenizer(self) -> Detokenizer | NoText:
        """A fresh detokenizer for one answer."""
        return Detokenizer(self._tokenizer, self._special) if self._tokenizer else NoText()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encoding = self._text_tokenizer().encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids

    def _text_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestRefused("no_tokenizer", "this model's directory has no tokenizer.json: send token_ids")
        return self._tokenizer


def load_text_codec(directory: Path, config: Mapping[str, Any]) -> TextCodec:
    """What `directory` holds; `config` is its config.json. ConfigError for a file that is there but is no good."""
    settings = _read_json(directory / "tokenizer_config.json")
    generation = _read_json(directory / "generation_config.json")
    tokenizer = _read_tokenizer(directory / "tokenizer.json")
    special_tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(settings.get(name))) is not None}
    eos = _ids(generation.get("eos_token_id")) | _ids(config.get("eos_token_id"))
    nested = config.get("text_config")
    if isinstance(nested, dict):
        eos |= _ids(nested.get("eos_token_id"))
    if tokenizer and (token := tokenizer.token_to_id(special_tokens.get("eos_token", ""))) is not None:
        eos |= {token}
    source = _template_source(directory / "chat_template.jinja", settings)
    template = ChatTemplate(source, special_tokens) if source is not None else None
    return TextCodec(tokenizer, template, frozenset(eos))


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if there is no such file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return value


def _read_tokenizer(path: Path) -> Tokenizer | None:
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_text(value: Any) -> str | None:
    """A special token is written as its text or as an AddedToken object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> set[int]:
    """Ids are written as null, a number or a list of numbers."""
    values = value if isinstance(value, list) else [value]
    return {i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0}


def _template_source(path: Path, settings: dict[str, Any]) -> str | None:
    """The file has precedence; tokenizer_config.json holds one template or several named ones, of which "default"."""
    if path.exists():
        return path.read_text("utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
