"""One request's text and ending against the one-shot decoding cut by a search in the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.detokenize import Detokenizer
from scheduler.paging import Holding
from scheduler.prefix_cache import PrefixCache
from scheduler.request import Ending, Request
from tests.scheduler.rig import CORPUS, train_tokenizer
from tests.scheduler.test_stopping import first_match
from worker.protocol import ExpertStats, Sampling

TOKENIZER = train_tokenizer(CORPUS)
END = 1
NOTHING = PrefixCache(16).root


def answer(tokens: list[int], ending: Ending) -> tuple[str, list[int], str | None]:
    """Text, token ids and reason when the model draws `tokens` one after the other."""
    request = Request(1, [5], Sampling(), ending, Detokenizer(TOKENIZER, frozenset({0, 1, 2})), 0.0)
    request.admit(Holding(NOTHING))
    text, ids = "", list[int]()
    for token in tokens:
        request.took_part(request.pending, "decode", ExpertStats())
        piece, reason = request.take_token(token, 1.0)
        text += piece.text
        ids += piece.token_ids
        if reason:
            return text, ids, reason
    return text, ids, None


@settings(max_examples=200)
@given(
    st.text("ab fox日é🦊", min_size=1, max_size=20),
    st.lists(st.text("ab fox日é🦊", min_size=1, max_size=3), max_size=3),
    st.integers(1, 40),
    st.booleans(),
)
def test_the_answer_is_the_decoding_up_to_whatever_ends_it_first(
    text: str, stops: list[str], max_tokens: int, ends: bool
) -> None:
    tokens = TOKENIZER.encode(text).ids + [END] * ends
    taken = tokens[:max_tokens]
    whole = TOKENIZER.decode([token for token in taken if token != END])
    end = first_match(whole, stops)
    got, ids, reason = answer(tokens, Ending(max_tokens, frozenset({END}), tuple(stops)))
    if end is not None:
        assert (got, reason) == (whole[:end], "stop")
    elif END in taken:
        assert (got, ids, reason) == (whole, taken, "stop")
    elif len(tokens) >= max_tokens:
        assert (got, ids, reason) == (whole, taken, "length")
    else:
        assert reason is None
        assert whole.startswith(got)


def test_the_figures_of_one_answer() -> None:
    request = Request(1, [5, 6], Sampling(), Ending(3), Detokenizer(TOKENIZER, frozenset()), arrived_s=10.0)
    request.admit(Holding(NOTHING))
    request.part(2, 16, now_s=11.0)
    request.took_part(2, "demand", ExpertStats(1, 9, 4, 5, 500))
    request.take_token(30, now_s=12.0)
    for now_s in (12.5, 13.5):
        request.part(1, 16, now_s)
        request.took_part(1, "decode", ExpertStats(1, 2, 1, 1, 100))
        request.take_token(30, now_s)
    finished = request.finished("length", now_s=14.0)
    usage, timing = finished.usage, finished.timing
    assert (usage.prompt_tokens, usage.new_tokens, usage.demand_chunks, usage.streamed_chunks) == (2, 3, 1, 0)
    assert (usage.expert_hits, usage.expert_misses, usage.copied_nbytes) == (6, 7, 700)
    assert (timing.queued_s, timing.ttft_s, timing.tpot_s, timing.total_s) == (1.0, 2.0, 0.75, 4.0)


def test_an_answer_that_never_began_has_no_times_but_its_own() -> None:
    request = Request(1, [5], Sampling(), Ending(3), Detokenizer(TOKENIZER, frozenset()), arrived_s=10.0)
    timing = request.finished("abort", now_s=12.0).timing
    assert (timing.queued_s, timing.ttft_s, timing.tpot_s, timing.total_s) == (2.0, 0.0, 0.0, 2.0)


def test_a_preempted_request_prefills_its_prompt_and_takes_its_answer_token_by_token_again() -> None:
    """As at first, but that it draws only behind its newest token; the decode steps before draw what nobody wants."""
    sampling = Sampling(temperature=1.0)
    request = Request(1, [5, 6, 7], sampling, Ending(3), Detokenizer(TOKENIZER, frozenset()), arrived_s=0.0)
    request.admit(Holding(NOTHING))
    request.took_part(3, "demand", ExpertStats())
    request.take_token(30, 1.0)
    request.took_part(1, "decode", ExpertStats())
    request.take_token(31, 1.5)
    request.preempt()
    assert (request.phase, request.pending, request.new_tokens, request.begun) == ("waiting", 3, 2, False)
    request.admit(Holding(NOTHING))
    assert request.part(3, 16, 2.0).sample is None and not request.draws(3)
    request.took_part(3, "demand", ExpertStats())
    for token, drawn in ((30, Sampling()), (31, sampling)):
        assert request.phase == "decode" and request.draws(1) == (drawn is sampling)
        part = request.part(1, 16, 2.0)
        assert (part.tokens, part.sample) == ([token], drawn)
        request.took_part(1, "decode", ExpertStats())
    request.take_token(32, 3.0)
    assert request.tokens == [5, 6, 7, 30, 31, 32]


def test_cached_tokens_are_those_of_the_prompt_that_were_never_computed() -> None:
    request = Request(1, list(range(9)), Sampling(), Ending(9), Detokenizer(TOKENIZER, frozenset()), arrived_s=0.0)
    request.admit(Holding(NOTHING))
    assert [request.reuse(0), request.reuse(4)] == [0, 4]
    request.took_part(2, "demand", ExpertStats())
    assert request.reuse(4) == 0 and request.computed == 6, "what it has computed stays"
    request.preempt()
    request.admit(Holding(NOTHING))
    assert request.reuse(8) == 2, "the first six were cached or computed before"
    request.took_part(1, "demand", ExpertStats())
    for token in (30, 31, 32):
        request.take_token(token, 1.0)
        request.took_part(1, "decode", ExpertStats())
    request.preempt()
    request.admit(Holding(NOTHING))
    assert request.reuse(12) == 0, "the answer's tokens are not the prompt's"
    assert request.finished("abort", 2.0).usage.cached_tokens == 6
