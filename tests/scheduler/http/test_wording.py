"""What is wrong with a request is told in the request's own names, as its client sent them."""

import json
from pathlib import Path
from typing import Any

import pytest

from copyengine.wire.errors import RequestRefused
from scheduler.http.completions import CompletionRequest
from scheduler.http.errors import api_error
from scheduler.http.wording import Wording
from tests.scheduler.chat_templates import JSON_CALLS
from tests.scheduler.http.chats import chats, write_chat_model
from tests.scheduler.rig import on_loop

OBJECT = {"type": "json_object"}


def by_schema(**schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def calling(**schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}], "tool_choice": "required"}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs", "top_logprobs 99 must be in [0, 20]"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens 0 must be at least 1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens 0 must be at least 1"),
    ({"seed": 2**70}, "seed", f"seed {2**70} must be"),
    ({"top_k": 2**70}, "top_k", f"top_k {2**70} must be"),
    ({"logit_bias": {str(10**22): 1}}, "logit_bias", f"logit_bias names token {10**22}"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids", f"stop_token_ids[0] = {2**70}"),
    ({"response_format": OBJECT, "ignore_eos": True}, "response_format", "response_format says where the answer ends"),
    ({"response_format": by_schema(type="nonsense")}, "response_format", "response_format: the grammar does not"),
    (calling(properties={"a": {"type": "nonsense"}}), "tools", "tools: the grammar does not compile: "),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages: the chat template refused them"),
    (
        {"messages": [{"role": "user", "content": "ab " * 99_999}]},
        "messages",
        "This model's maximum context length is 4096 tokens. Here: a prompt of 300038 characters, at least 4097 tokens",
    ),
    (
        {"max_completion_tokens": 9999},
        "messages",
        "This model's maximum context length is 4096 tokens. Here: a prompt of ",
    ),
]


def test_chats_are_told_of_their_own_fields(tmp_path: Path) -> None:
    refusing = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools first') }}{% endif %}"

    async def main() -> None:
        async with chats(write_chat_model(tmp_path, refusing + JSON_CALLS)) as client:
            for request, param, words in WRONG:
                error = await client.refused(**request)
                assert (error["param"], error["message"][: len(words)]) == (param, words), request
                assert "x-guidance" not in error["message"] and "start:" not in error["message"], "what we wrote"

    on_loop("selector", main)


def test_a_schema_that_is_too_much_to_follow_is_the_clients_doing(tmp_path: Path) -> None:
    """No error of ours that a client would retry; in a stream the same."""

    async def main() -> None:
        async with chats(write_chat_model(tmp_path, JSON_CALLS)) as client:
            client.answers("what no grammar of JSON allows")
            error = await client.refused(response_format=OBJECT)
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_grammar")
            assert error["param"] == "response_format" and error["message"].startswith("response_format: the answer")
            streamed = await client.stream(response_format=OBJECT)
            assert json.loads(streamed[-1]) == {"error": error}

    on_loop("selector", main)


def test_completions_are_told_of_theirs() -> None:
    """By the engine's words, most of which the endpoint says itself."""
    wording = Wording(CompletionRequest(prompt="a"), 4096)
    for detail, param, message in (
        ("token_ids[1] = 9 is not in the vocabulary", "prompt", "prompt[1] = 9 is not in the vocabulary"),
        ("logprobs 21 must be", "logprobs", "logprobs 21 must be"),
        ("no field of theirs", None, "no field of theirs"),
    ):
        told = api_error(RequestRefused("invalid_request", detail), "req-1", wording).body.error
        assert (told.param, told.message) == (param, message)


@pytest.mark.parametrize("known", [0, 4096])
def test_clients_find_the_words_that_they_look_for(known: int) -> None:
    refused = RequestRefused("context_length_exceeded", "a prompt of 9 tokens")
    told = api_error(refused, "req-1", Wording(CompletionRequest(prompt="a"), known)).body.error
    assert told.message.startswith("This model's maximum context length is ") and told.param == "prompt"
    assert ("is 4096 tokens." in told.message) == bool(known)
