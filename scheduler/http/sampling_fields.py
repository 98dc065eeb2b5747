"""The fields by which completions and chats alike say how answers are drawn."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from scheduler.http.default_sampling import DefaultSampling
from scheduler.http.errors import invalid
from scheduler.http.limits import (
    Biases,
    Choices,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    StopText,
    StopTexts,
    StopTokens,
    Temperature,
    TopK,
    TopP,
)
from scheduler.protocol import Sampling
from scheduler.validate import MAX_CHOICES, SEEDS


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: the last event before [DONE] has the usage and no choices. With `continuous_usage_stats`, which
    vLLM's clients send, each event besides has that of its own choice so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Literal[False] | None, Meta(description="no padding is ever sent")] = None


class SamplingFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Null means the same as leaving a field out: then temperature, top_p, top_k, min_p and repetition_penalty are what
    the checkpoint's generation_config.json states, if it does. See protocol.Sampling of what they mean."""

    model: Annotated[str | None, Meta(description="the served model's name")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Choices | None, Meta(description="answers to each prompt")] = None
    temperature: Annotated[
        Temperature | None, Meta(description="what the checkpoint says, else 1, if not given; 0 is greedy")
    ] = None
    top_p: TopP | None = None
    top_k: Annotated[TopK | None, Meta(description="-1 or 0 is off")] = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Biases | None = None
    user: Annotated[str | None, Meta(description="a label of the client's; nothing depends on it")] = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage. ApiError if that is asked of what is no stream."""
        if self.stream_options is None:
            return False
        if not self.stream:
            raise invalid("stream_options is only for stream: true", "stream_options")
        if self.stream_options.continuous_usage_stats and not self.stream_options.include_usage:
            raise invalid("continuous_usage_stats is only for include_usage: true", "stream_options")
        return bool(self.stream_options.include_usage)

    @property
    def tells_usage_so_far(self) -> bool:
        """Whether each event of a stream has it."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


def sampling_of(
    fields: SamplingFields, defaults: DefaultSampling, prompts: int, max_tokens: int | None, logprobs: int | None
) -> Sampling:
    """What the engine is asked for. What is out of range the engine itself refuses, by its name.

    ApiError if `prompts` times n are too many.
    """
    n = 1 if fields.n is None else fields.n
    if n > 0 and prompts * n > MAX_CHOICES:
        raise invalid(f"{prompts} prompts with n {n} each are more than {MAX_CHOICES} answers", "n")
    top_k = defaults.top_k if fields.top_k is None else fields.top_k
    seed = fields.seed
    if seed is not None and -SEEDS <= seed < 0:  # what OpenAI takes
        seed += SEEDS
    return Sampling(
        temperature=_given(fields.temperature, defaults.temperature),
        top_p=_given(fields.top_p, defaults.top_p),
        top_k=0 if top_k == -1 else top_k,
        seed=seed,
        max_tokens=max_tokens,
        stop=[fields.stop] if isinstance(fields.stop, str) else fields.stop or [],
        stop_token_ids=fields.stop_token_ids or [],
        ignore_eos=bool(fields.ignore_eos),
        min_p=_given(fields.min_p, defaults.min_p),
        repetition_penalty=_given(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(fields.presence_penalty, 0.0),
        frequency_penalty=_given(fields.frequency_penalty, 0.0),
        logit_bias=fields.logit_bias or {},
        logprobs=logprobs,
        n=n,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
