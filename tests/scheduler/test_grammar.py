"""Masks against languages written out word by word, over a vocabulary small enough to try every token."""

import asyncio
import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from copyengine.wire.errors import RequestRefused
from copyengine.wire.loop import run
from scheduler import grammar
from scheduler.grammar import GrammarCompiler, GrammarMatcher, Grammars

SPECIAL = ["<|start|>", "<|end|>", "<|stop|>"]
ENDS = {1, 2}
PIECES = ["a", "b", "c", "<", "|", ">", "s", "t", "r", "ab", "bc", "abc", "ca", "<|", "st"]
NAMED = "<call>"
"""A token that is added, but is none of the special ones."""
TEXTS = [*SPECIAL, *PIECES, NAMED]
VOCAB = 70
"""The model's, of which the tokenizer knows the first."""


def tokenizer() -> Tokenizer:
    """A byte-level BPE of these pieces."""
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "a"), ("<", "|"), ("s", "t")]
    made = Tokenizer(models.BPE({text: i for i, text in enumerate([*SPECIAL, *PIECES])}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.add_tokens([NAMED])
    return made


def grammars(ends: set[int] = ENDS, vocab_size: int = VOCAB) -> Grammars:
    made = tokenizer()
    return Grammars(made.to_str(), made.get_vocab_size(), ends, vocab_size)


GRAMMARS = grammars()


def matcher_of(text: str) -> GrammarMatcher:
    return GRAMMARS.matchers(text, 1)[0]


def tokens_of(mask: bytes) -> set[int]:
    bits = int.from_bytes(mask, "little")
    return {token for token in range(bits.bit_length()) if bits >> token & 1}


def check(matcher: GrammarMatcher, prefix: str, begins: Callable[[str], bool], ends: bool) -> list[int]:
    """What `matcher` allows behind `prefix`, against what `begins` says of each continuation; the tokens but the ends.

    Where the text can go on in one way only, one token of several that spell it is enough.
    """
    possible = {i for i, text in enumerate(TEXTS) if i >= len(SPECIAL) and begins(prefix + text)}
    possible.discard(TEXTS.index(NAMED))  # which no grammar here names
    if not possible and prefix:
        assert matcher.is_over == ends and not matcher.fault
        return []
    assert not matcher.is_over or not possible
    allowed = tokens_of(matcher.allowed())
    assert len(matcher.allowed()) == 12 and (allowed & ENDS == ENDS if ends else not allowed & ENDS)
    allowed -= ENDS
    forced = len({TEXTS[token][0] for token in possible}) == 1 and not ends
    assert (allowed <= possible and len(allowed) > 0) if forced else allowed == possible
    return sorted(allowed)


WORDS = st.sets(st.text("abc<|>str", min_size=1, max_size=6), min_size=1, max_size=8)


@given(WORDS, st.randoms(use_true_random=False))
def test_a_mask_allows_what_some_word_of_the_language_goes_on_with(words: set[str], draws: random.Random) -> None:
    """Against the words, on a random walk to the end of one."""
    matcher = matcher_of("start: " + " | ".join(f'"{word}"' for word in sorted(words)))
    prefix = ""
    while allowed := check(matcher, prefix, lambda text: any(w.startswith(text) for w in words), prefix in words):
        token = draws.choice(allowed)
        prefix += TEXTS[token]
        matcher.take(token)
    assert prefix in words


def nested(text: str) -> bool:
    """Whether it begins a word of a^n c b^n."""
    head, middle, tail = text.partition("c")
    if not middle:
        return not text.strip("a")
    return not head.strip("a") and not tail.strip("b") and len(tail) <= len(head)


@given(st.randoms(use_true_random=False))
def test_a_mask_of_a_language_without_an_end_and_with_a_memory(draws: random.Random) -> None:
    """Against an acceptor that counts."""
    matcher = matcher_of('start: "a" start "b" | "c"')
    prefix = ""
    for _ in range(30):
        ends = "c" in prefix and prefix.count("a") == prefix.count("b")
        allowed = check(matcher, prefix, nested, ends)
        if not allowed:
            assert ends
            return
        token = draws.choice(allowed)
        prefix += TEXTS[token]
        matcher.take(token)


def spelt(text: str) -> list[int]:
    """The tokens of the one answer that a grammar leaves."""
    matcher = matcher_of(text)
    tokens: list[int] = []
    while not matcher.is_over:
        (token,) = tokens_of(matcher.allowed())
        tokens.append(token)
        matcher.take(token)
        assert not matcher.fault
    return tokens


def test_special_tokens_come_where_they_are_named_and_only_there() -> None:
    """Also in a text that reads like one, which a tokenizer would take for it."""
    for name in ("<|start|>", "<|stop|>", NAMED):
        assert spelt(f'start: "a" {name} "b"') == [TEXTS.index("a"), TEXTS.index(name), TEXTS.index("b")]
    for text in ("<|st|>", "a<|start|>b", "<|start|>", "c<|stst"):
        tokens = spelt(f'start: "{text}"')
        assert "".join(TEXTS[token] for token in tokens) == text and min(tokens) >= len(SPECIAL)
    matcher = matcher_of("start: /[a-z<|>]*/")
    assert tokens_of(matcher.allowed()) == {*range(len(SPECIAL), len(TEXTS) - 1), *ENDS}


def test_an_answer_that_may_be_empty_ends_by_a_token_or_goes_on() -> None:
    """Of a language of the empty word alone only a token that ends is allowed; without one there is no answer."""
    assert tokens_of(matcher_of('start: "a"?').allowed()) == {TEXTS.index("a"), *ENDS}
    assert tokens_of(matcher_of('start: ""').allowed()) == ENDS
    with pytest.raises(RequestRefused, match="no answer matches the grammar: no token") as refused:
        grammars(set()).matchers('start: ""', 1)
    assert refused.value.code == "invalid_grammar"


def test_a_model_without_end_tokens_goes_on_until_nothing_can_follow() -> None:
    """Against the words; what llguidance takes for the end of the tokenizer is none of the model's."""
    (matcher,) = grammars(set()).matchers('start: "ab" "c"?', 1)
    for token, left in (("ab", {"c"}), ("c", set[str]())):
        matcher.take(TEXTS.index(token))
        assert {TEXTS[token] for token in tokens_of(matcher.allowed())} == left
    assert matcher.is_over


@pytest.mark.parametrize("vocab_size", [5, 18, 32, 33, 64, 65, 1000])
def test_masks_are_of_the_model_s_vocabulary(vocab_size: int) -> None:
    """Against the tokenizer's tokens that the model has, and end tokens that only the model has."""
    (matcher,) = grammars({1, 31, 63, 999}, vocab_size).matchers("start: /[a-z<|>]*/", 1)
    known = {*range(len(SPECIAL), len(TEXTS) - 1), 1, 31, 63, 999}
    assert len(matcher.allowed()) == (vocab_size + 31) // 32 * 4
    assert tokens_of(matcher.allowed()) == {token for token in known if token < vocab_size}


def test_answers_to_one_prompt_go_their_own_ways() -> None:
    first, second, third = GRAMMARS.matchers('start: "a" ("b" | "c")', 3)
    first.take(TEXTS.index("ab"))
    second.take(TEXTS.index("a"))
    assert first.is_over and not second.is_over
    assert {TEXTS[token] for token in tokens_of(second.allowed())} == {"b", "c"}
    assert {TEXTS[token] for token in tokens_of(third.allowed())} == {"a", "ab"}


def test_a_token_that_is_not_allowed_is_a_fault() -> None:
    matcher = matcher_of('start: "ab"')
    matcher.take(TEXTS.index("c"))
    assert matcher.fault.startswith(f"token {TEXTS.index('c')} is none that it allows here")
    assert not matcher.is_over and matcher.allowed() == b""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("begin: /a/", "does not compile: no start rule found"),
        ("start: /(/", "unclosed group"),
        ("start: <|nobody|>", 'unknown special token: "<|nobody|>"'),
        ('start: %json {"type": "number", "minimum": 3, "maximum": 1}', "Unsatisfiable schema"),
        ('start: %json {"type": "numb"}', "Invalid type: numb"),
        ("start: start", "no answer matches the grammar"),
        ('start: "x"', "no answer matches the grammar"),
        ('{"grammars": []}', "does not compile"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        GRAMMARS.matchers(text, 1)
    assert refused.value.code == "invalid_grammar" and said in refused.value.detail


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("STEP_ITEMS", "Too many items"),
        ("ROW_ITEMS", "Current row has"),
        ("STEP_FUEL", "too many expressions"),
        ("INITIAL_FUEL", "grammar) too big"),
        ("MAX_LEXER_STATES", "too many states"),
        ("MAX_GRAMMAR_SIZE", "number of symbols) too big"),
    ],
)
def test_a_grammar_that_is_too_much_work_is_refused_or_fails(
    monkeypatch: pytest.MonkeyPatch, limit: str, said: str
) -> None:
    """Against llguidance's words, with limits so low that this grammar is over each of them now or soon."""
    monkeypatch.setattr(grammar, limit, 3)
    try:
        (matcher,) = grammars().matchers('start: ("a" | "b" | "ca" | /[abc]{2,5}s/)+ "<"', 1)
        for text in "abcabcabca":
            if not matcher.fault:
                matcher.take(TEXTS.index(text))
        why, allowed = matcher.fault, matcher.allowed()
    except RequestRefused as refused:
        assert refused.code == "invalid_grammar"
        why, allowed = refused.detail, b""
    assert said in why and not allowed


def test_a_tokenizer_that_llguidance_does_not_know() -> None:
    with pytest.raises(ValueError):
        Grammars('{"model": {"type": "None"}}', 3, {1}, 3)


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "COMPILE_S", 0.05)
    goes_on = threading.Event()

    def stuck() -> list[GrammarMatcher]:
        goes_on.wait(20)
        return []

    async def main() -> None:
        compiler = GrammarCompiler()
        try:
            waits = [compiler.run(stuck, lambda: None) for _ in range(grammar.COMPILE_THREADS + 1)]
            late = await asyncio.gather(*waits, return_exceptions=True)
            assert all(isinstance(error, RequestRefused) and error.code == "invalid_grammar" for error in late)
            assert sum("llguidance is still at it" in str(error) for error in late) == grammar.COMPILE_THREADS
            goes_on.set()
            monkeypatch.setattr(grammar, "COMPILE_S", 20.0)
            (matcher,) = await compiler.run(lambda: GRAMMARS.matchers('start: "a"', 1), lambda: None)
            assert tokens_of(matcher.allowed()) == {TEXTS.index("a")}
        finally:
            goes_on.set()
            compiler.close()

    run(main(), "selector")
