"""Validation against the ranges that protocol.Sampling and protocol.Generate state."""

import math
from typing import Any

import pytest

from copyengine.wire.errors import RequestRefused
from scheduler.protocol import Generate, Message, Sampling
from scheduler.validate import MAX_GRAMMAR_CHARS, check_generate, check_prompt

HI = [Message("user", "hi")]
VOCAB = 100


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "exactly one"),
        ({"prompt": "a", "token_ids": [1]}, "exactly one"),
        ({"prompt": "a", "messages": HI}, "exactly one"),
        ({"prompt": ""}, "prompt is empty"),
        ({"token_ids": []}, "token_ids is empty"),
        ({"messages": []}, "messages is empty"),
    ],
)
def test_exactly_one_prompt_that_is_not_empty(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestRefused, match=named) as refused:
        check_generate(Generate(**fields), True, VOCAB)
    assert refused.value.code == "invalid_request"


BAD: list[tuple[str, Any]] = [
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -0.1),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", 2**63),
    ("seed", -1),
    ("seed", 2**63),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("stop", [""]),
    ("stop", ["a" * 1025]),
    ("stop", ["a"] * 65),
    ("stop_token_ids", [3, VOCAB]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1] * 1025),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 0.009),
    ("repetition_penalty", 100.1),
    ("repetition_penalty", math.nan),
    ("presence_penalty", -2.01),
    ("presence_penalty", 2.01),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.01),
    ("frequency_penalty", math.inf),
    ("logit_bias", {VOCAB: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {2: 100.5}),
    ("logit_bias", {2: math.nan}),
    ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ("logprobs", -1),
    ("logprobs", 21),
    ("n", 0),
    ("n", 129),
]
GOOD: list[tuple[str, Any]] = [
    ("temperature", 0.0),
    ("temperature", 100.0),
    ("top_p", 1e-9),
    ("top_p", 1.0),
    ("top_k", 0),
    ("seed", 0),
    ("seed", 2**63 - 1),
    ("max_tokens", 1),
    ("stop", ["a" * 1024] * 64),
    ("stop_token_ids", [0, VOCAB - 1] * 512),
    ("min_p", 0.0),
    ("min_p", 1.0),
    ("repetition_penalty", 0.01),
    ("repetition_penalty", 100.0),
    ("presence_penalty", -2.0),
    ("presence_penalty", 2.0),
    ("frequency_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("logit_bias", {0: -100.0, VOCAB - 1: 100.0}),
    ("logprobs", 0),
    ("logprobs", 20),
    ("n", 1),
    ("n", 128),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_setting_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestRefused, match=field) as refused:
        check_generate(Generate(prompt="a", sampling=Sampling(**{field: value})), True, VOCAB)
    assert refused.value.code == "invalid_request"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("min_p", 1.5, "min_p 1.5 must be in [0, 1]"),
        ("presence_penalty", math.nan, "presence_penalty nan must be in [-2, 2]"),
        ("n", 129, "n 129 must be in [1, 128]"),
        ("logit_bias", {7: 101.0}, "logit_bias[7] 101.0 must be in [-100, 100]"),
        ("logit_bias", {100: 1.0}, "logit_bias names token 100, which is not in the vocabulary of 100"),
        ("stop_token_ids", [1, 200], "stop_token_ids[1] = 200 is not in the vocabulary of 100"),
    ],
)
def test_a_refusal_names_field_value_and_bound(field: str, value: Any, said: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        check_generate(Generate(prompt="a", sampling=Sampling(**{field: value})), True, VOCAB)
    assert refused.value.detail == said


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_the_edges_of_each_range_are_accepted(field: str, value: Any) -> None:
    check_generate(Generate(prompt="a", sampling=Sampling(**{field: value})), True, VOCAB)


def test_a_grammar_is_refused_that_is_too_long_or_may_not_end() -> None:
    """Against the code and the words; the edge of its length is accepted."""
    longest = MAX_GRAMMAR_CHARS
    check_generate(Generate(prompt="a", sampling=Sampling(grammar="x" * longest)), True, VOCAB)
    for sampling, code, said in (
        (Sampling(grammar="x" * (longest + 1)), "invalid_grammar", f"has {longest + 1} characters, at most {longest} "),
        (Sampling(grammar="x", ignore_eos=True), "invalid_request", "ignore_eos cannot be asked for with it"),
    ):
        with pytest.raises(RequestRefused, match=f"grammar .*{said}") as refused:
            check_generate(Generate(prompt="a", sampling=sampling), True, VOCAB)
        assert refused.value.code == code


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a"},
        {"messages": HI},
        {"token_ids": [1], "sampling": Sampling(stop=["x"])},
        {"token_ids": [1], "sampling": Sampling(grammar="start: /a/")},
    ],
)
def test_without_a_tokenizer_only_token_ids_are_served(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as refused:
        check_generate(Generate(**fields), False, VOCAB)
    assert refused.value.code == "no_tokenizer"
    check_generate(Generate(token_ids=[1]), False, VOCAB)


@pytest.mark.parametrize("token", [-1, 100, 2**40])
def test_a_token_outside_the_vocabulary_is_refused_with_its_place(token: int) -> None:
    with pytest.raises(RequestRefused, match=rf"token_ids\[2\] = {token} "):
        check_prompt([0, 99, token], 100, Sampling(), 10)


@pytest.mark.parametrize(
    ("prompt", "wanted", "limit", "granted"),
    [(4, 6, 10, 6), (4, None, 10, 6), (9, None, 10, 1), (1, None, 1000, 256), (1, 1, 2, 1)],
)
def test_what_fits_is_granted(prompt: int, wanted: int | None, limit: int, granted: int) -> None:
    assert check_prompt([1] * prompt, 100, Sampling(max_tokens=wanted), limit) == granted


@pytest.mark.parametrize(("prompt", "wanted"), [(4, 7), (10, None), (11, None), (10, 1)])
def test_what_can_never_fit_is_refused_with_both_numbers(prompt: int, wanted: int | None) -> None:
    with pytest.raises(RequestRefused, match=rf"{prompt} tokens.*into the 10 tokens") as refused:
        check_prompt([1] * prompt, 100, Sampling(max_tokens=wanted), 10)
    assert refused.value.code == "context_length_exceeded"


def test_a_prompt_that_cannot_fit_is_refused_without_being_read() -> None:
    """A list of millions of tokens would hold up the event loop: its length says enough."""
    with pytest.raises(RequestRefused) as refused:
        check_prompt([-1] * 11, 100, Sampling(), 10)
    assert refused.value.code == "context_length_exceeded"
