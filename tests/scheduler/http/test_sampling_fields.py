"""What fields of OpenAI's and of vLLM's users become, against Samplings written by hand."""

import msgspec
import pytest

from scheduler.http.default_sampling import DefaultSampling
from scheduler.http.errors import ApiError
from scheduler.http.sampling_fields import SamplingFields, sampling_of
from scheduler.protocol import Sampling
from scheduler.validate import MAX_CHOICES


def sampling(text: str, prompts: int = 1) -> Sampling:
    return sampling_of(msgspec.json.decode(text, type=SamplingFields), DefaultSampling(), prompts, 7, 3)


def test_openais_defaults_are_not_the_engines() -> None:
    assert sampling("{}") == Sampling(temperature=1.0, max_tokens=7, logprobs=3)


def test_every_field_arrives() -> None:
    text = """{"temperature": 0, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "seed": 5, "stop": ["a", "b"], "n": 2,
        "stop_token_ids": [1, 2], "ignore_eos": true, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        "repetition_penalty": 1.5, "logit_bias": {"3": -100, "4": 1.5}, "user": "somebody"}"""
    assert sampling(text) == Sampling(
        temperature=0,
        top_p=0.5,
        top_k=4,
        seed=5,
        max_tokens=7,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        ignore_eos=True,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={3: -100, 4: 1.5},
        logprobs=3,
        n=2,
    )


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ('{"stop": "x"}', "stop", ["x"]),
        ('{"stop": ""}', "stop", [""]),  # which the engine refuses
        ('{"top_k": -1}', "top_k", 0),
        ('{"top_k": -2}', "top_k", -2),  # likewise
        ('{"seed": -1}', "seed", 2**63 - 1),
        ('{"seed": -9223372036854775808}', "seed", 0),
        ('{"seed": 0}', "seed", 0),
        ('{"ignore_eos": false}', "ignore_eos", False),
    ],
)
def test_what_others_write_otherwise(text: str, field: str, value: object) -> None:
    assert getattr(sampling(text), field) == value


def test_answers_have_a_bound_over_all_prompts() -> None:
    assert sampling('{"n": 2}', MAX_CHOICES // 2).n == 2
    for n, prompts in ((2, MAX_CHOICES // 2 + 1), (1, MAX_CHOICES + 1), (MAX_CHOICES + 1, 1)):
        with pytest.raises(ApiError, match=f"{prompts} prompts with n {n}"):
            sampling(f'{{"n": {n}}}', prompts)


def test_usage_is_only_for_streams() -> None:
    def fields(text: str) -> SamplingFields:
        return msgspec.json.decode(text, type=SamplingFields)

    assert not fields("{}").includes_usage and not fields('{"stream": true}').includes_usage
    assert fields('{"stream": true, "stream_options": {"include_usage": true}}').includes_usage
    assert not fields('{"stream": true, "stream_options": {"include_usage": null}}').includes_usage
    with pytest.raises(ApiError, match="stream_options"):
        _ = fields('{"stream": false, "stream_options": {}}').includes_usage
