"""Token-by-token text against the tokenizer's one-shot decoding, for three kinds of decoder."""

from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from scheduler.detokenize import LONG, Detokenizer
from tests.scheduler.rig import CORPUS, train_tokenizer

FAMILY = "👨‍👩‍👧‍👦"
DIFFICULT = st.sampled_from([*"aé 日🦊\u200d\ufe0f\ufffd \n", "👩\u200d🚀", FAMILY])
TEXTS = st.lists(st.one_of(st.characters(codec="utf-8"), DIFFICULT), max_size=30).map("".join)


def metaspace() -> Tokenizer:
    """SentencePiece-like: a leading space is dropped, unknown characters fall back to byte tokens."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "b", "▁the", "é", "日"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def wordpiece() -> Tokenizer:
    pieces = ["[UNK]", "[CLS]", "the", "##s", "fox", ".", "'", "##é", "日", ","]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens([AddedToken("[CLS]", special=True)])
    return tokenizer


TOKENIZERS = {"byte-level": train_tokenizer(CORPUS), "metaspace": metaspace(), "wordpiece": wordpiece()}


def in_pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    special = frozenset(t for t, entry in tokenizer.get_added_tokens_decoder().items() if entry.special)
    detokenizer = Detokenizer(tokenizer, special)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@settings(max_examples=300)
@given(TEXTS)
def test_a_text_comes_back_in_whole_characters(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    pieces = in_pieces(tokenizer, tokenizer.encode(text).ids)
    assert "".join(pieces) == text
    assert all(piece in text for piece in pieces)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=300)
@given(data=st.data())
def test_any_tokens_at_all_read_as_the_one_shot_decoding(kind: str, data: st.DataObject) -> None:
    """Random tokens: unfinished characters, stray continuation bytes, special and unknown tokens."""
    tokenizer = TOKENIZERS[kind]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=25))
    assert "".join(in_pieces(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("text", [" a", "a b", "naïve", "日本語", FAMILY, "🦊" * 40, "\n\n ", "e\u0301"])
def test_known_difficult_texts(text: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert "".join(in_pieces(tokenizer, tokenizer.encode(text).ids)) == text


@pytest.mark.parametrize(
    "pieces",
    [
        ["▁the", "▁", "<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>", "▁a"],
        ["<0xF0>", "<0x9F>", "a"],
        ["▁", "▁", "a", "<0xCC>", "<0x81>", "b"],
        ["<s>", "▁a", "<s>", "▁the"],
    ],
)
def test_byte_tokens_and_leading_spaces(pieces: list[str]) -> None:
    """Characters that fell back to bytes, whole, cut off and combining; spaces that are dropped only at the start."""
    tokenizer = TOKENIZERS["metaspace"]
    tokens = [token for piece in pieces if (token := tokenizer.token_to_id(piece)) is not None]
    assert len(tokens) == len(pieces)
    assert "".join(in_pieces(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_an_unfinished_character_waits_and_shows_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    tokens = tokenizer.encode("a\U0001f9ff").ids  # not in the corpus: one token a byte
    pieces = in_pieces(tokenizer, tokens[:-1])
    assert pieces[0] == "a"
    assert set(pieces[1:-1]) == {""}
    assert pieces[-1] == "\ufffd"


class CountingTokenizer:
    """Another tokenizer, which notes how many tokens each decoding was of."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.id_to_token = tokenizer.id_to_token
        self._decode = tokenizer.decode
        self.decoded = [0]

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        self.decoded.append(len(tokens))
        text: str = self._decode(tokens, skip_special_tokens=skip_special_tokens)
        return text


def stray_bytes(count: int) -> list[int]:
    """Continuation bytes that continue nothing, now and then a character's beginning."""
    tokenizer = TOKENIZERS["byte-level"]
    beginning, continuation = tokenizer.encode("\U0001f9ff").ids[:2]
    return [beginning if i % 37 == 0 else continuation for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 2000])
@pytest.mark.parametrize("kind", ["letters", "stray bytes"])
def test_no_push_decodes_more_the_longer_the_answer_is(kind: str, count: int) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    counting = CountingTokenizer(tokenizer)
    detokenizer = Detokenizer(cast(Tokenizer, counting), frozenset())
    tokens = tokenizer.encode("a" * count).ids if kind == "letters" else stray_bytes(count)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    assert max(counting.decoded) <= 2 * LONG
    assert text == tokenizer.decode(tokens)


@settings(max_examples=300)
@given(st.lists(st.sampled_from([*stray_bytes(2), *range(5)]), min_size=LONG, max_size=80))
def test_long_runs_of_unfinished_characters(tokens: list[int]) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert "".join(in_pieces(tokenizer, tokens)) == tokenizer.decode(tokens)
