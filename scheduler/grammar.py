"""Grammars that answers must match: what an answer may go on with, token by token, through llguidance.

llguidance knows the tokenizer's tokens. The model may have more; what only the model has is never allowed.
"""

from collections.abc import Callable, Iterable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from copyengine.wire.errors import RequestRefused
from scheduler.panics import Panic, caught
from scheduler.timed_threads import TimedThreads

COMPILE_S = 10.0
"""Seconds that a grammar may take to compile, its wait for a thread included: the largest that may be sent takes some
hundredths. When they are over the request is refused, as invalid_grammar."""

COMPILE_THREADS = 2
"""Grammars that are compiled at a time; others wait. Each may take 100 MB and a core."""

MAX_LEXER_STATES = 50_000
"""Of one grammar, of 1 to 2 kB each by llguidance's word: 100 MB at most, where its own limit would be 500."""
MAX_GRAMMAR_SIZE = 500_000
"""Symbols; llguidance's own, which the text's length keeps most grammars far below."""
INITIAL_FUEL, STEP_FUEL, STEP_ITEMS, ROW_ITEMS = 1_000_000, 200_000, 50_000, 2000
"""llguidance's own: by its word some 20 ms of making the lexer, and 14 and 3 ms of a step, in which nothing else of the
scheduler runs. What goes beyond fails alone."""

LEFT_OUT = "<non-verbose/>"
"""What llguidance puts for the state and the grammar, which nobody needs to read with an error."""
MAX_REASON_CHARS = 2000
"""Of what llguidance says of a grammar, some of which names every special token."""


class Vocabulary:
    """The tokens that masks are over: bit t % 8 of byte t // 8 is token t's, in whole words of 4 bytes."""

    def __init__(self, tokenizer: str, size: int, ends: Iterable[int], vocab_size: int) -> None:
        self.ends = sorted(token for token in ends if 0 <= token < vocab_size)
        end = next((token for token in self.ends if token < size), None)
        try:
            self.tokenizer: LLTokenizer = caught(LLTokenizer, tokenizer, eos_token=end)
        except Panic as error:
            raise ValueError(str(error)) from error
        self.supposed_ends = {self.tokenizer.eos_token, *self.ends}  # the first is what llguidance has at an end
        self.nbytes = -(-vocab_size // 32) * 4
        self._unknown = range(vocab_size, 8 * self.nbytes)  # bits behind the model's last token

    def fitted(self, mask: bytes) -> bytearray:
        """One over the tokenizer's tokens as one over the model's."""
        fitted = bytearray(mask[: self.nbytes].ljust(self.nbytes, b"\0"))
        clear(fitted, self._unknown)
        return fitted

    def spelt(self, special: int) -> list[int]:
        """The tokens that the text of a special token takes if it is written out."""
        return self.tokenizer.greedy_tokenize(self.tokenizer.decode_bytes([special]).decode(errors="replace"))


class GrammarMatcher:
    """What one answer may go on with: see scheduler.request.AnswerGrammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        """`matcher` is at the answer's beginning. A `fault` then says why no answer matches."""
        self.is_over = False
        self.fault = ""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._allowed = b""
        self._look()

    def allowed(self) -> bytes:
        """See AnswerGrammar. No token but those that end the answer if it is over."""
        return self._allowed

    def take(self, token: int) -> None:
        """See AnswerGrammar."""
        if self._matcher.consume_token(token):
            self._look()
        else:
            self._fail(f"token {token} is none that it allows here")

    def copy(self) -> "GrammarMatcher":
        """Another one, for another answer."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocabulary)

    def _look(self) -> None:
        """Which tokens are allowed now."""
        mask = self._vocabulary.fitted(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            self._fail("it leads nowhere, or is too much work")
            return
        if self._matcher.is_accepting():
            clear(mask, self._vocabulary.supposed_ends)
            self.is_over = not any_set(mask)
            mark(mask, self._vocabulary.ends)
        else:
            self._spell_out(mask)
        self._allowed = bytes(mask)
        if not any_set(mask):
            self._fail("no token of the model's goes on here")

    def _spell_out(self, mask: bytearray) -> None:
        """Where a text can go on in one way only, llguidance allows just the token that the tokenizer would begin it
        with. If it reads like a special token it is that one, which llguidance then does not take."""
        token = only_one(mask)
        if token is None or not self._vocabulary.tokenizer.is_special_token(token):
            return
        if not self._matcher.validate_tokens([token]):
            clear(mask, [token])
            mark(mask, self._vocabulary.spelt(token)[:1])

    def _fail(self, why: str) -> None:
        said = self._matcher.get_error().removesuffix(LEFT_OUT)[:MAX_REASON_CHARS].strip()
        self.fault = f"{why}{': ' if said else ''}{said}"
        self._allowed = b""


class Grammars:
    """Makes matchers over one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: str, size: int, ends: Iterable[int], vocab_size: int) -> None:
        """`tokenizer` is the text of tokenizer.json, of `size` tokens; `ends` are the tokens that end an answer, and
        `vocab_size` the model's.

        It takes 0.9 s of a processor, in which no other thread runs, and 125 MB for 150,000 tokens, 8 ms and 4 MB for
        1,536: it is to be made before anything is served. A token of an answer then takes 45 and 5 µs at the median
        (AMD EPYC, llguidance 1.9, 2026-11). ValueError if llguidance knows no such tokenizer.
        """
        self._vocabulary = Vocabulary(tokenizer, size, ends, vocab_size)
        self._limits = LLParserLimits(
            max_items_in_row=ROW_ITEMS,
            initial_lexer_fuel=INITIAL_FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=STEP_ITEMS,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )

    def matchers(self, grammar: str, count: int) -> list[GrammarMatcher]:
        """One for each of `count` answers. RequestRefused("invalid_grammar") with llguidance's own reason."""
        lark = LLMatcher.grammar_from_lark(grammar)
        matcher = LLMatcher(self._vocabulary.tokenizer, lark, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _invalid(f"the grammar does not compile: {matcher.get_error()[:MAX_REASON_CHARS].strip()}")
        first = GrammarMatcher(matcher, self._vocabulary)
        if first.fault:
            raise _invalid(f"no answer matches the grammar: {first.fault}")
        return [first, *(first.copy() for _ in range(1, count))]


class GrammarCompiler:
    """Runs what compiles grammars, each for COMPILE_S at most."""

    def __init__(self) -> None:
        self._threads = TimedThreads(COMPILE_THREADS, "grammar")

    async def run(
        self, compiling: Callable[[], list[GrammarMatcher]], still_waits: Callable[[], None]
    ) -> list[GrammarMatcher]:
        """What `compiling()` returns or raises. `still_waits` is called now and then; an error of it ends the wait.

        RequestRefused("invalid_grammar") after COMPILE_S.
        """
        return await self._threads.run(compiling, COMPILE_S, _late, still_waits)

    def close(self) -> None:
        """Grammars that wait for a thread get none any more."""
        self._threads.close()


def any_set(mask: bytearray) -> bool:
    """Whether any bit is."""
    return mask.count(0) < len(mask)


def only_one(mask: bytearray) -> int | None:
    """The one bit that is set; None if there are none or several."""
    if mask.count(0) != len(mask) - 1:
        return None
    byte = mask.strip(b"\0")[0]
    return 8 * mask.index(byte) + byte.bit_length() - 1 if byte.bit_count() == 1 else None


def mark(mask: bytearray, tokens: Iterable[int]) -> None:
    """Set their bits, of those that it has."""
    for token in tokens:
        if token < 8 * len(mask):
            mask[token // 8] |= 1 << token % 8


def clear(mask: bytearray, tokens: Iterable[int]) -> None:
    """Clear their bits, of those that it has."""
    for token in tokens:
        if token < 8 * len(mask):
            mask[token // 8] &= ~(1 << token % 8)


def _late(begun: bool) -> RequestRefused:
    why = "llguidance is still at it" if begun else f"other grammars held all {COMPILE_THREADS} threads"
    return _invalid(f"the grammar was not compiled after {COMPILE_S:g} s: {why}")


def _invalid(detail: str) -> RequestRefused:
    return RequestRefused("invalid_grammar", detail)
