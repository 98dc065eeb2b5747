"""/v1/completions against the made-up model's rule, one-shot decoding, and OpenAI's shapes written by hand."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from scheduler.http.completions import CompletionRequest, _top
from scheduler.protocol import Logprobs, TokenLogprob
from tests.scheduler.http.rig import MODEL, HttpRig, serving
from tests.scheduler.rig import COPY_FAILED, expected, on_loop


class Text:
    """The model's tokenizer, for expectations."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def of(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))


def answer(rig: HttpRig, text: Text, prompt: list[int], count: int) -> str:
    return text.of(expected(prompt, count, rig.vocab_size))


def test_all_kinds_of_prompts(model: Path, event_loop: str) -> None:
    """And 16 tokens where no number is asked for."""
    text = Text(model)
    ids = [text.ids("the quick"), text.ids("brown fox")]
    kinds: list[tuple[Any, list[list[int]]]] = [
        ("the quick", ids[:1]),
        (["the quick", "brown fox"], ids),
        (ids[0], ids[:1]),
        (ids, ids),
        (["the quick"], ids[:1]),
    ]

    async def main() -> None:
        async with serving(model) as rig:
            for prompt, prompts in kinds:
                reply = (await rig.post(prompt=prompt)).json()
                assert [choice["text"] for choice in reply["choices"]] == [answer(rig, text, p, 16) for p in prompts]
                assert [choice["index"] for choice in reply["choices"]] == list(range(len(prompts)))
                assert reply["usage"]["completion_tokens"] == 16 * len(prompts)
                assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts))
            await rig.at_rest()

    on_loop(event_loop, main)


def test_the_whole_of_a_reply(model: Path) -> None:
    text = Text(model)

    async def main() -> None:
        async with serving(model) as rig:
            reply = await rig.post(model=MODEL, prompt="the quick", max_tokens=3)
            body = reply.json()
            assert reply.headers["x-request-id"].startswith("req-")
            assert body.pop("id").startswith("cmpl-") and isinstance(body.pop("created"), int)
            prompt = text.ids("the quick")
            assert body == {
                "object": "text_completion",
                "model": MODEL,
                "choices": [
                    {"index": 0, "text": answer(rig, text, prompt, 3), "logprobs": None, "finish_reason": "length"}
                ],
                "usage": {
                    "prompt_tokens": len(prompt),
                    "completion_tokens": 3,
                    "total_tokens": len(prompt) + 3,
                    "prompt_tokens_details": {"cached_tokens": 0},
                },
            }

    on_loop("selector", main)


def test_a_stream_says_what_a_whole_reply_says(model: Path, event_loop: str) -> None:
    """With several prompts and several answers to each, characters of several tokens, usage and log-probabilities."""
    request = {"prompt": ["the quick", "naïve café 🦊"], "n": 2, "max_tokens": 40, "logprobs": 2}

    async def main() -> None:
        async with serving(model) as rig:
            whole = (await rig.post(**request)).json()
            *events, usage, done = await rig.events(**request, stream_options={"include_usage": True})
            assert done == "[DONE]"
            assert usage["choices"] == [] and usage["usage"] == whole["usage"] | {
                "prompt_tokens_details": usage["usage"]["prompt_tokens_details"]
            }
            assert all(event["usage"] is None for event in events)
            assert {(event["id"], event["created"], event["object"]) for event in events} == {
                (usage["id"], usage["created"], "text_completion")
            }
            for expected_choice in whole["choices"]:
                parts = [c for e in events for c in e["choices"] if c["index"] == expected_choice["index"]]
                assert "".join(part["text"] for part in parts) == expected_choice["text"]
                assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
                for name, values in expected_choice["logprobs"].items():
                    told = [value for part in parts if part["logprobs"] for value in part["logprobs"][name]]
                    assert told == values, name
            assert len(whole["choices"]) == 4
            without = await rig.events(prompt="a", max_tokens=2)
            assert all("usage" not in event for event in without[:-1])
            await rig.at_rest()

    on_loop(event_loop, main)


def test_stop_and_end_of_sequence(model: Path) -> None:
    text = Text(model)

    async def main() -> None:
        async with serving(model) as rig:
            whole = answer(rig, text, text.ids("the quick"), 30)
            for stop in (whole[8:10], [whole[8:10], "nowhere"]):
                reply = (await rig.post(prompt="the quick", max_tokens=30, stop=stop)).json()
                assert reply["choices"][0]["text"] == whole[: whole.index(whole[8:10])]
                assert reply["choices"][0]["finish_reason"] == "stop"
            prompt = text.ids("the quick")
            fifth = expected(prompt, 5, rig.vocab_size)[-1]
            reply = (await rig.post(prompt=prompt, max_tokens=30, stop_token_ids=[fifth])).json()
            assert reply["choices"][0]["finish_reason"] == "stop" and reply["usage"]["completion_tokens"] == 5

    on_loop("selector", main)


def test_log_probabilities_have_openais_shape(model: Path) -> None:
    """Against the made-up model's: the drawn token at -token / 8, the likeliest from 3 on, each a half less likely."""
    text = Text(model)

    async def main() -> None:
        async with serving(model) as rig:
            for top in (0, 2):
                reply = (await rig.post(prompt=[60], max_tokens=3, logprobs=top)).json()
                names = [text.of([token]) for token in (61, 62, 63)]
                assert reply["choices"][0]["logprobs"] == {
                    "tokens": names,
                    "token_logprobs": [-61 / 8, -62 / 8, -63 / 8],
                    "top_logprobs": [
                        {text.of([i]): -0.5 * i for i in range(3, 3 + top)} | {name: -token / 8}
                        for name, token in zip(names, (61, 62, 63), strict=True)
                    ],
                    "text_offset": [0, len(names[0]), len(names[0] + names[1])],
                }

    on_loop("selector", main)


def test_of_tokens_with_one_text_the_likeliest_is_told() -> None:
    """Two halves of characters have the same text, and a model without tokenizer none."""
    halves = Logprobs(TokenLogprob(9, -3.0, "�"), [TokenLogprob(7, -1.0, "�"), TokenLogprob(8, -2.0, "a")])
    assert _top(halves) == {"�": -1.0, "a": -2.0}
    textless = Logprobs(TokenLogprob(9, -3.0, ""), [TokenLogprob(7, -1.0, "")])
    assert _top(textless) == {"token_id:7": -1.0, "token_id:9": -3.0}


@pytest.mark.parametrize(
    ("fields", "status", "param", "code", "words"),
    [
        ({"prompt": "a", "model": "other"}, 404, "model", "model_not_found", "other"),
        ({}, 400, "prompt", "missing_required_parameter", "prompt"),
        ({"prompt": "a", "frobnicate": 1}, 400, "frobnicate", "unsupported_parameter", "frobnicate"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix", "unsupported_parameter", "suffix"),
        ({"prompt": "a", "echo": True}, 400, "echo", "unsupported_parameter", "echo"),
        ({"prompt": "a", "best_of": 2}, 400, "best_of", "unsupported_parameter", "best_of"),
        ({"prompt": "a", "n": 0}, 400, "n", "invalid_request", "n 0"),
        ({"prompt": ["a"] * 65, "n": 2}, 400, "n", None, "128"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options", None, "stream"),
        (
            {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
            400,
            "stream_options",
            None,
            "include_usage",
        ),
        (
            {"prompt": "a", "stream": True, "stream_options": {"x": 1}},
            400,
            "stream_options.x",
            "unsupported_parameter",
            "x",
        ),
        ({"prompt": []}, 400, "prompt", None, "empty"),
        ({"prompt": ""}, 400, "prompt", "invalid_request", "empty"),
        ({"prompt": [[1], []]}, 400, "prompt", "invalid_request", "empty"),
        ({"prompt": ["a"] * 129}, 400, "prompt", None, "129 prompts"),
        ({"prompt": [1, "a"]}, 400, "prompt", None, "mixes"),
        ({"prompt": [1, True]}, 400, "prompt[1]", None, "bool"),
        ({"prompt": [10**30]}, 400, "prompt", "invalid_request", f"{10**30} is not in the vocabulary"),
        ({"prompt": [100000]}, 400, "prompt", "invalid_request", "100000"),
        ({"prompt": "a", "max_tokens": "9"}, 400, "max_tokens", None, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "invalid_request", "at least 1"),
        (
            {"prompt": "a", "max_tokens": 99999},
            400,
            "prompt",
            "context_length_exceeded",
            "99999 do not fit into",
        ),
        ({"prompt": "ab " * 99999}, 400, "prompt", "context_length_exceeded", "4096"),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs", "invalid_request", "20"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature", "invalid_request", "temperature"),
        ({"prompt": "a", "top_k": -2}, 400, "top_k", "invalid_request", "top_k"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", None, "int"),
        ({"prompt": "a", "stop": ["x"] * 65}, 400, "stop", "invalid_request", "64"),
    ],
)
def test_what_is_wrong_is_named(
    model: Path, fields: dict[str, Any], status: int, param: str | None, code: str | None, words: str
) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            for stream in (False, True) if "stream" not in fields and "stream_options" not in fields else (None,):
                reply = await rig.post(**fields, **({} if stream is None else {"stream": stream}))
                error = reply.json()["error"]
                assert (reply.status_code, error["param"], error["code"]) == (status, param, code), error
                assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
                assert words in error["message"]
            await rig.at_rest()

    on_loop("selector", main)


def test_each_event_may_have_the_usage_of_its_choice_so_far(model: Path) -> None:
    """As vLLM has it, whose load generators ask for it: against a count of the tokens by their log-probabilities."""

    async def main() -> None:
        async with serving(model) as rig:
            options = {"include_usage": True, "continuous_usage_stats": True}
            request: dict[str, Any] = {"prompt": [[7, 8, 9], [4]], "n": 2, "max_tokens": 5, "logprobs": 0}
            *events, last, done = await rig.events(**request, stream_options=options)
            assert done == "[DONE]" and last["usage"]["prompt_tokens"] == 4
            assert last["usage"]["completion_tokens"] == 20 and last["usage"]["prompt_tokens_details"] is not None
            new = [0] * 4
            for event in events:
                (choice,) = event["choices"]
                i = choice["index"]
                new[i] += len((choice["logprobs"] or {"tokens": []})["tokens"])
                prompt = (3, 3, 1, 1)[i]
                assert event["usage"] == {
                    "prompt_tokens": prompt,
                    "completion_tokens": new[i],
                    "total_tokens": prompt + new[i],
                    "prompt_tokens_details": None,
                }
            assert new == [5] * 4

    on_loop("selector", main)


def test_fields_that_openai_lets_be_null_may_be(model: Path) -> None:
    async def main() -> None:
        async with serving(model) as rig:
            nulls = {name: None for name in CompletionRequest.__struct_fields__ if name != "prompt"}
            reply = await rig.post(**nulls, prompt="the quick")
            assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 16

    on_loop("selector", main)


def test_a_model_without_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", "utf-8")

    async def main() -> None:
        async with serving(tmp_path) as rig:
            reply = (await rig.post(prompt=[5, 6], max_tokens=2, logprobs=0)).json()
            assert reply["choices"][0]["text"] == ""
            assert reply["choices"][0]["logprobs"]["tokens"] == ["token_id:7", "token_id:8"]
            refused = await rig.post(prompt="text")
            assert refused.status_code == 400 and refused.json()["error"]["code"] == "no_tokenizer"

    on_loop("selector", main)


def test_what_the_engine_refuses_or_breaks_off(model: Path) -> None:
    """A queue that is full, and a worker whose step fails: an error before a stream's first event, and after it."""

    async def main() -> None:
        async with serving(model, engine={"max_running_requests": 1, "max_queued_requests": 0}) as rig:
            rig.engine.worker.gate.clear()
            first = asyncio.create_task(rig.post(prompt="the quick", max_tokens=2))
            await rig.engine.settled(1)
            full = await rig.post(prompt="brown fox")
            assert (full.status_code, full.headers["retry-after"]) == (429, "1")
            assert full.json()["error"]["code"] == "queue_full"
            rig.engine.worker.gate.set()
            assert (await first).status_code == 200

            rig.engine.worker.failures.append(COPY_FAILED)
            failed = await rig.post(prompt="brown fox")
            assert failed.status_code == 503 and failed.json()["error"]["code"] == "worker_failed"
            await rig.at_rest()

    on_loop("selector", main)
