"""What a Generate must satisfy. Pure; everything refused here is refused before it takes any room."""

import math
import sys
from collections.abc import Sequence

from copyengine.wire.errors import RequestRefused
from scheduler.protocol import Generate, Sampling
from worker.protocol import MAX_LOGPROBS

DEFAULT_MAX_TOKENS = 256
"""New tokens of a request that does not say: an answer of a paragraph, for who forgets it."""

MAX_STOPS = 64
"""Strings that may end an answer: each is looked for in every piece of it."""

MAX_STOP_CHARS = 1024
"""Of such a string: so much text may be held back until it is known to be none."""

MAX_STOP_TOKENS = 1024
"""Tokens that may end an answer."""

MAX_BIASES = 1024
"""Tokens with a bias of a request; they travel with each step."""

MAX_BIAS = 100.0
"""OpenAI's: no other token is drawn with it, or this one never."""

MAX_CHOICES = 128
"""Answers to one request, and over HTTP to all prompts of one body: OpenAI's. Each is computed by itself."""

SEEDS = 2**63
MAX_GRAMMAR_CHARS = 1 << 18
"""A schema of 10,000 strings, 240,000 characters, compiled in 30 ms (2 busy cores of an AMD EPYC, 2026-11)."""

RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, sys.float_info.max, "a number >= 0"),
    "top_p": (math.ulp(0.0), 1, "in (0, 1]"),
    "top_k": (0, SEEDS - 1, ">= 0 (0 is off)"),
    "min_p": (0, 1, "in [0, 1]"),
    "repetition_penalty": (0.01, 100, "in [0.01, 100]"),
    "presence_penalty": (-2, 2, "in [-2, 2]"),
    "frequency_penalty": (-2, 2, "in [-2, 2]"),
    "seed": (0, SEEDS - 1, "in [0, 2**63)"),
    "max_tokens": (1, SEEDS - 1, "at least 1"),
    "logprobs": (0, MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
    "n": (1, MAX_CHOICES, f"in [1, {MAX_CHOICES}]"),
}
"""Least and largest value, and that in words. Those of the penalties are OpenAI's; a repetition penalty near 0 would
turn a logit into infinity."""


def check_generate(generate: Generate, has_text: bool, vocab_size: int) -> None:
    """Everything that can be said before the prompt is tokenised. RequestRefused names the field and the value."""
    stated = [name for name in ("prompt", "token_ids", "messages") if getattr(generate, name) is not None]
    if len(stated) != 1:
        raise _invalid(f"exactly one of prompt, token_ids and messages is needed, not {stated or 'none'}")
    if not getattr(generate, stated[0]):
        raise _invalid(f"{stated[0]} is empty")
    sampling = generate.sampling
    texts = [name for name in stated if name != "token_ids"]
    texts += [name for name in ("stop", "grammar") if getattr(sampling, name)]
    if texts and not has_text:
        raise RequestRefused(
            "no_tokenizer", f"{texts[0]} needs a tokenizer, and this model's directory has no tokenizer.json"
        )
    check_sampling(sampling, vocab_size)


def check_prompt(prompt: Sequence[int], vocab_size: int, sampling: Sampling, max_model_len: int) -> int:
    """The most tokens this request may generate. RequestRefused for a token out of range or one that can never fit."""
    if not prompt:
        raise _invalid("the prompt has no tokens")
    room = max_model_len - len(prompt)
    wanted = sampling.max_tokens
    if room < (wanted or 1):
        more = f" and max_tokens {wanted}" if wanted else " and an answer"
        raise RequestRefused(
            "context_length_exceeded",
            f"a prompt of {len(prompt)} tokens{more} do not fit into the {max_model_len} tokens "
            "that one request may take: --max-model-len, or what the model and its KV hold",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        i = next(i for i, token in enumerate(prompt) if not 0 <= token < vocab_size)
        raise _invalid(f"token_ids[{i}] = {prompt[i]} is not in the vocabulary of {vocab_size}")
    return min(DEFAULT_MAX_TOKENS, room) if wanted is None else wanted


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """That part of check_generate that needs neither prompt nor tokenizer."""
    for name, (least, most, words) in RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not least <= value <= most:  # so is NaN, which compares with nothing
            raise _invalid(f"{name} {value} must be {words}")
    _check_stops(sampling, vocab_size)
    _check_grammar(sampling)
    if len(sampling.logit_bias) > MAX_BIASES:
        raise _invalid(f"logit_bias has {len(sampling.logit_bias)} entries, at most {MAX_BIASES} are allowed")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise _invalid(f"logit_bias names token {token}, which is not in the vocabulary of {vocab_size}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _invalid(f"logit_bias[{token}] {bias} must be in [{-MAX_BIAS:g}, {MAX_BIAS:g}]")


def _check_stops(sampling: Sampling, vocab_size: int) -> None:
    if len(sampling.stop) > MAX_STOPS:
        raise _invalid(f"stop has {len(sampling.stop)} strings, at most {MAX_STOPS} are allowed")
    for i, stop in enumerate(sampling.stop):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise _invalid(f"stop[{i}] has {len(stop)} characters; 1 to {MAX_STOP_CHARS} are allowed")
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise _invalid(f"stop_token_ids has {len(sampling.stop_token_ids)} ids, at most {MAX_STOP_TOKENS} are allowed")
    for i, token in enumerate(sampling.stop_token_ids):
        if not 0 <= token < vocab_size:
            raise _invalid(f"stop_token_ids[{i}] = {token} is not in the vocabulary of {vocab_size}")


def _check_grammar(sampling: Sampling) -> None:
    """What can be said without compiling it."""
    if len(sampling.grammar) > MAX_GRAMMAR_CHARS:
        raise RequestRefused(
            "invalid_grammar",
            f"grammar has {len(sampling.grammar)} characters, at most {MAX_GRAMMAR_CHARS} are allowed",
        )
    if sampling.grammar and sampling.ignore_eos:
        raise _invalid("grammar says where the answer ends: ignore_eos cannot be asked for with it")


def _invalid(detail: str) -> RequestRefused:
    return RequestRefused("invalid_request", detail)
