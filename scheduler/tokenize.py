"""What a checkpoint directory says about text: tokenizer, chat template, end-of-sequence tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.normalizers import Normalizer

from copyengine.checkpoint.directory import json_object, read_text
from copyengine.checkpoint.keys import show
from copyengine.wire.errors import ConfigError, RequestRefused
from scheduler.chat_template import ChatTemplate
from scheduler.detokenize import Detokenizer, NoText
from scheduler.grammar import Grammars
from scheduler.panics import caught
from scheduler.protocol import Generate, Message

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
"""What is read here."""

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""What structures an answer is in its text, also where a tokenizer calls these tokens special."""

COMPOSED_OF = 4
"""Characters that Unicode composes into one at most: U+1F82 and its like."""

PIECE_CHARS = 16_384
"""Characters normalised at a time: 1.4 ms in which no other thread of the process runs (2 cores of an AMD EPYC)."""


class TextCodec:
    """Turns prompts into tokens and tokens into text. Safe to use from several threads.

    `eos_token_ids` end an answer: those of generation_config.json (of config.json if it states none) and the
    tokenizer's eos_token. `chat_template` is None if the model has none. `added_tokens` are those that the tokenizer
    takes for one token whatever is around them, by their text, as far as that is part of an answer's.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, chat_template: ChatTemplate | None, eos_token_ids: frozenset[int]
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
        hidden = (token for token, entry in added.items() if entry.special and entry.content not in MARKERS)
        self._special = frozenset(hidden)
        left_out = self._special | eos_token_ids
        self.added_tokens = {entry.content: token for token, entry in added.items() if token not in left_out}
        self._normaliser = tokenizer.normalizer if tokenizer else None
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer else 1

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer at all."""
        return self._tokenizer is not None

    def encode(self, generate: Generate, max_tokens: int | None = None) -> list[int]:
        """Token ids of the one thing that `generate` states. RequestRefused if it is text and cannot be encoded.

        Text that cannot fit into `max_tokens` is refused without being encoded: that has more characters than so many
        tokens of the vocabulary's longest, after the tokenizer's normaliser (see `exceeds`).
        """
        if generate.prompt is not None:
            return self.encode_prompt(generate.prompt, max_tokens)
        if generate.messages is not None:
            return self.encode_chat(generate.messages, max_tokens)
        return generate.token_ids or []

    def encode_prompt(self, prompt: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer's post-processor adds."""
        return self._encode(prompt, max_tokens, add_special_tokens=True)

    def encode_chat(self, messages: list[Message], max_tokens: int | None = None) -> list[int]:
        """Token ids of the rendered chat, whose template writes its special tokens itself."""
        template = self.template()
        return self.encode_rendered(
            template.render([{"role": m.role, "content": m.content} for m in messages]), max_tokens
        )

    def encode_rendered(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text that has its special tokens in it, as a chat template writes it."""
        return self._encode(text, max_tokens, add_special_tokens=False)

    def template(self) -> ChatTemplate:
        """The chat template. RequestRefused if chats cannot be served."""
        self._text_tokenizer()
        if self.chat_template is None:
            raise RequestRefused("no_chat_template", "this model has no chat template: send prompt or token_ids")
        return self.chat_template

    def decode(self, token_ids: list[int]) -> str:
        """Their text, special tokens included. RequestRefused if there is no tokenizer, or no such token."""
        tokenizer = self._text_tokenizer()
        for i, token in enumerate(token_ids):
            if not 0 <= token < 2**31 or tokenizer.id_to_token(token) is None:
                raise RequestRefused("invalid_request", f"tokens[{i}] = {token} is no token of this model")
        try:
            return str(caught(tokenizer.decode, token_ids, skip_special_tokens=False))
        except Exception as error:  # the library raises nothing more precise
            raise RequestRefused("invalid_request", f"the tokenizer cannot decode them: {error}") from error

    def token_name(self, token: int) -> str | None:
        """What the vocabulary calls a token; None if there is none of that id."""
        name: str | None = self._tokenizer.id_to_token(token) if self._tokenizer else None
        return name

    def tokens(self) -> list[int]:
        """All tokens that the tokenizer has, ascending."""
        return sorted(set(self._tokenizer.get_vocab().values())) if self._tokenizer else []

    def normalised(self, text: str) -> str:
        """What the tokenizer's normaliser makes of `text`, before it is cut into tokens."""
        return str(caught(self._normaliser.normalize_str, text)) if self._normaliser else text

    def detokenizer(self) -> Detokenizer | NoText:
        """A fresh detokenizer for one answer."""
        return Detokenizer(self._tokenizer, self._special) if self._tokenizer else NoText()

    def grammars(self, vocab_size: int) -> Grammars | None:
        """What makes matchers for answers of a model of `vocab_size` tokens; None if there is no tokenizer.

        Raises as Grammars does, and takes as long.
        """
        if self._tokenizer is None:
            return None
        return Grammars(self._tokenizer.to_str(), self._tokenizer.get_vocab_size(), self.eos_token_ids, vocab_size)

    def _encode(self, text: str, max_tokens: int | None, add_special_tokens: bool) -> list[int]:
        tokenizer = self._text_tokenizer()
        if max_tokens is not None and self._exceeds(text, max_tokens * self._longest_token):
            raise RequestRefused(
                "context_length_exceeded",
                f"a prompt of {len(text)} characters, at least {max_tokens + 1} tokens, does not fit into the "
                f"{max_tokens} tokens of --max-model-len, which hold {max_tokens * self._longest_token} at most",
            )
        # `encode` would hold the interpreter's lock all the while, 0.98 s for 2 MB; this for 0.02 s (2 cores of an AMD
        # EPYC, tokenizers 0.23, 2026-11), so that other threads go on.
        try:
            return caught(tokenizer.encode_batch_fast, [text], add_special_tokens=add_special_tokens)[0].ids
        except Exception as error:  # the library raises nothing more precise
            raise RequestRefused("invalid_request", f"the tokenizer cannot encode the prompt: {error}") from error

    def _exceeds(self, text: str, bound: int) -> bool:
        try:
            return caught(exceeds, text, bound, self._normaliser)
        except Exception as error:  # as above
            raise RequestRefused("invalid_request", f"the tokenizer cannot normalise the prompt: {error}") from error

    def _text_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestRefused("no_tokenizer", "this model's directory has no tokenizer.json: send token_ids")
        return self._tokenizer


def exceeds(text: str, bound: int, normaliser: Normalizer | None) -> bool:
    """Whether `text` has more than `bound` characters once `normaliser` has composed them.

    It is normalised in pieces, and no further than is needed; as a cut may separate what would be composed, each piece
    counts for COMPOSED_OF - 1 characters less. Not at all if it is so long that no composition helps: a normaliser that
    takes away more than that, of stretches of blanks say, does not save a text.
    """
    if normaliser is None or not bound < len(text) <= COMPOSED_OF * bound:
        return len(text) > bound
    count = 0
    for start in range(0, len(text), PIECE_CHARS):
        count += len(normaliser.normalize_str(text[start : start + PIECE_CHARS])) - (COMPOSED_OF - 1)
        if count > bound:
            return True
    return False


def load_text_codec(directory: Path, config: Mapping[str, Any]) -> TextCodec:
    """What `directory` holds; `config` is its config.json. ConfigError for a file that is there but is no good."""
    settings = _read_json(directory / "tokenizer_config.json")
    generation = _read_json(directory / "generation_config.json")
    tokenizer = _read_tokenizer(directory / "tokenizer.json")
    special_tokens = {name: text for name in _SPECIAL_TOKENS if (text := _token_text(settings.get(name))) is not None}
    eos = _ids(generation, "generation_config.json") or _config_ids(config)
    if tokenizer and (token := tokenizer.token_to_id(special_tokens.get("eos_token", ""))) is not None:
        eos |= {token}
    return TextCodec(tokenizer, _chat_template(directory, settings, special_tokens), frozenset(eos))


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if there is no such file."""
    text = read_text(path)
    return {} if text is None else json_object(text, str(path))


def _read_tokenizer(path: Path) -> Tokenizer | None:
    text = read_text(path)
    if text is None:
        return None
    try:
        tokenizer: Tokenizer = caught(Tokenizer.from_str, text)
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


def _config_ids(config: Mapping[str, Any]) -> set[int]:
    """Those of config.json, and of the part of it that describes the language model in one of several modes."""
    nested = config.get("text_config")
    return _ids(config, "config.json") | (_ids(nested, "config.json") if isinstance(nested, dict) else set())


def _ids(settings: Mapping[str, Any], source: str) -> set[int]:
    """The eos_token_id of `settings`: null, a number or a list of numbers, of which those below 0 mean none."""
    value = settings.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) for i in values):
        raise ConfigError(f"{source}: eos_token_id is {show(value)}: must be a token id or a list of them")
    return {i for i in values if i >= 0}


def _chat_template(directory: Path, settings: dict[str, Any], special_tokens: dict[str, str]) -> ChatTemplate | None:
    """The file has precedence; tokenizer_config.json holds one template or several named ones, of which "default"."""
    path = directory / "chat_template.jinja"
    source: Any = read_text(path)
    if source is None:
        path, source = directory / "tokenizer_config.json", settings.get("chat_template")
    if isinstance(source, list):
        source = _default_template(source, path)
    if source is not None and not isinstance(source, str):
        raise ConfigError(f"{path}: chat_template is {show(source)}: must be a template or a list of named ones")
    return None if source is None else ChatTemplate(source, special_tokens, str(path))


def _default_template(named: list[Any], path: Path) -> Any:
    """The template named "default" of a list of objects with `name` and `template`; None if there is none."""
    for entry in named:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ConfigError(f"{path}: chat_template holds {show(entry)}: must be a template with a name")
    return next((entry.get("template") for entry in named if entry["name"] == "default"), None)
