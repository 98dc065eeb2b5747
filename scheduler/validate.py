"""What a Generate must satisfy. Pure; everything refused here is refused before it takes any room."""

import math
from collections.abc import Sequence

from copyengine.wire.errors import RequestRefused
from scheduler.protocol import Generate, Sampling

DEFAULT_MAX_TOKENS = 256
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
SEEDS = 2**63


def check_generate(generate: Generate, has_text: bool) -> None:
    """Everything that can be said before the prompt is tokenised. RequestRefused names the field and the value."""
    stated = [name for name in ("prompt", "token_ids", "messages") if getattr(generate, name) is not None]
    if len(stated) != 1:
        raise _invalid(f"exactly one of prompt, token_ids and messages is needed, not {stated or 'none'}")
    if not getattr(generate, stated[0]):
        raise _invalid(f"{stated[0]} is empty")
    if not has_text and (stated[0] != "token_ids" or generate.sampling.stop):
        wanted = "stop" if stated[0] == "token_ids" else stated[0]
        raise RequestRefused(
            "no_tokenizer", f"{wanted} needs a tokenizer, and this model's directory has no tokenizer.json"
        )
    _check_sampling(generate.sampling)


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
            f"a prompt of {len(prompt)} tokens{more} do not fit into the {max_model_len} tokens of --max-model-len",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        i = next(i for i, token in enumerate(prompt) if not 0 <= token < vocab_size)
        raise _invalid(f"token_ids[{i}] = {prompt[i]} is not in the vocabulary of {vocab_size}")
    return min(DEFAULT_MAX_TOKENS, room) if wanted is None else wanted


def _check_sampling(sampling: Sampling) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise _invalid(f"temperature {sampling.temperature} must be a number >= 0")
    if not 0 < sampling.top_p <= 1:
        raise _invalid(f"top_p {sampling.top_p} must be in (0, 1]")
    if not 0 <= sampling.top_k < SEEDS:
        raise _invalid(f"top_k {sampling.top_k} must be >= 0 (0 is off)")
    if sampling.seed is not None and not 0 <= sampling.seed < SEEDS:
        raise _invalid(f"seed {sampling.seed} must be in [0, 2**63)")
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise _invalid(f"max_tokens {sampling.max_tokens} must be at least 1")
    if len(sampling.stop) > MAX_STOPS:
        raise _invalid(f"stop has {len(sampling.stop)} strings, at most {MAX_STOPS} are allowed")
    for i, stop in enumerate(sampling.stop):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise _invalid(f"stop[{i}] has {len(stop)} characters; 1 to {MAX_STOP_CHARS} are allowed")


def _invalid(detail: str) -> RequestRefused:
    return RequestRefused("invalid_request", detail)
