"""/v1/chat/completions over a worker that answers by a script: against that script, and streams against what is not."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler.http.chat_requests import ChatRequest
from tests.scheduler.chat_templates import JSON_CALLS, XML_CALLS
from tests.scheduler.http.chats import Chats, chats, write_chat_model
from tests.scheduler.rig import on_loop

PLAIN = "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content }}{% endfor %}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "does",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
            "strict": False,
        },
    }
]


def talk(directory: Path, template: str, session: Callable[[Chats], Awaitable[None]], **files: Any) -> None:
    write_chat_model(directory, template, **files)

    async def main() -> None:
        async with chats(directory) as client:
            await session(client)

    on_loop("selector", main)


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    ids = [call.pop("id") for call in choice["message"].get("tool_calls", [])]
    assert len(set(ids)) == len(ids) and all(call_id.startswith("call_") for call_id in ids)
    return choice


def test_an_answer_is_content_thinking_and_calls(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>'
    called = {"type": "function", "function": {"name": "f", "arguments": '{"a": 5}'}}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("naïve 🦊", {}, {"content": "naïve 🦊"}, "stop"),
        ("", {}, {"content": ""}, "stop"),
        ("<think>\nhm\n</think>\n\nfox", {}, {"content": "\n\nfox", "reasoning_content": "\nhm\n"}, "stop"),
        ("<think>\nhm 🦊", {}, {"content": None, "reasoning_content": "\nhm 🦊"}, "stop"),
        (call, {}, {"content": call}, "stop"),
        (call, {"tools": TOOLS, "tool_choice": "none"}, {"content": call}, "stop"),
        (call, {"tools": TOOLS}, {"content": None, "tool_calls": [called]}, "tool_calls"),
        (f"I do {call}\n{call}", {"tools": TOOLS}, {"content": "I do", "tool_calls": [called] * 2}, "tool_calls"),
        (
            f"<think>hm</think>\n\n{call}",
            {"tools": TOOLS, "tool_choice": "auto"},
            {"content": None, "reasoning_content": "hm", "tool_calls": [called]},
            "tool_calls",
        ),
        (f"{call}", {"tools": TOOLS, "max_tokens": 3}, {"content": "<tool_call>\n{"}, "length"),
    ]

    async def session(client: Chats) -> None:
        for answer, request, message, reason in cases:
            client.answers(answer)
            whole = without_ids(await client.whole(**request))
            assert whole["message"] == {"role": "assistant", "refusal": None} | message
            assert whole["finish_reason"] == reason
            assert without_ids(await client.streamed(**request)) == whole

    talk(tmp_path, JSON_CALLS, session)


@pytest.mark.parametrize("special", [False, True])
def test_a_prompt_that_opens_the_thinking(tmp_path: Path, special: bool) -> None:
    """Also where the markers are special tokens of the tokenizer's."""
    call = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"

    async def session(client: Chats) -> None:
        client.answers(f"hm</think>{call}")
        whole = await client.whole(tools=TOOLS)
        assert whole["message"]["reasoning_content"] == "hm" and whole["message"]["content"] is None
        assert json.loads(whole["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 5}
        client.answers(f"hm{call}")  # as models do that forget to end their thinking
        assert (await client.whole(tools=TOOLS))["message"]["reasoning_content"] == "hm"
        client.answers("the fox")
        assert (await client.whole())["message"]["reasoning_content"] == "the fox"
        settings = {"chat_template_kwargs": {"enable_thinking": False}}
        assert (await client.whole(**settings))["message"] == {
            "role": "assistant",
            "refusal": None,
            "content": "the fox",
        }
        assert client.prompt().endswith("<think>\n\n</think>\n\n")

    talk(tmp_path, XML_CALLS, session, special=special)


def test_what_the_model_is_given(tmp_path: Path) -> None:
    """Against hand-written prompts."""

    async def session(client: Chats) -> None:
        client.answers("so")
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        turns = [
            {"role": "developer", "content": "brief"},
            {"role": "user", "content": parts, "name": "me"},
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None},
            {"role": "user", "content": ""},
        ]
        await client.whole(messages=turns)
        assert client.prompt() == "<|user|>system:brief<|user|>user:a\nb<|user|>assistant:<|user|>user:"
        goes_on = {"add_generation_prompt": False, "continue_final_message": True}
        await client.whole(messages=[*turns[:2], {"role": "assistant", "content": "I say "}], **goes_on)
        assert client.prompt() == "<|user|>system:brief<|user|>user:a\nb<|user|>assistant:I say "

    talk(tmp_path, PLAIN, session)


def test_calls_and_tools_in_the_prompt(tmp_path: Path) -> None:
    """A conversation sent back as it was answered, against what the template makes of it."""

    async def session(client: Chats) -> None:
        client.answers('<think>hm</think><tool_call>\n{"name": "f", "arguments": {"a":5}}\n</tool_call>')
        user = {"role": "user", "content": "the fox"}
        message = (await client.whole(messages=[user], tools=TOOLS))["message"]
        told = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "fine"}
        await client.whole(messages=[user, message, told], tools=TOOLS)
        prompt = client.prompt()
        tool = {"type": "function", "function": {k: v for k, v in TOOLS[0]["function"].items() if k != "strict"}}  # type: ignore[attr-defined]
        assert json.dumps(tool) in prompt
        assert '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>' in prompt
        assert "<tool_response>\nfine\n</tool_response>" in prompt
        await client.whole(tools=TOOLS, tool_choice="none")
        assert "<tools>" not in client.prompt()

    talk(tmp_path, JSON_CALLS, session)


@pytest.mark.parametrize(
    ("template", "answer", "shown"),
    [
        (
            JSON_CALLS,
            '<tool_call>\n{"name": "f", "arguments": {"a": [5',
            '<tool_call>\n{"name": "f", "arguments": {"a": [5}\n</tool_call>',
        ),
        (
            XML_CALLS,
            "</think><tool_call>\n<function=f>\n<parameter=b>\nso",
            "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        ),
    ],
)
def test_a_call_that_was_cut_off_is_sent_back(tmp_path: Path, template: str, answer: str, shown: str) -> None:
    """As it was answered, against what the template makes of it: the conversation goes on."""

    async def session(client: Chats) -> None:
        client.answers(answer)
        user = {"role": "user", "content": "the fox"}
        message = (await client.whole(messages=[user], tools=TOOLS))["message"]
        with pytest.raises(json.JSONDecodeError):
            json.loads(message["tool_calls"][0]["function"]["arguments"])
        told = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "no JSON"}
        await client.whole(messages=[user, message, told], tools=TOOLS)
        assert shown in client.prompt()

    talk(tmp_path, template, session)


def sample_of(client: Chats) -> Any:
    """How the worker was told to draw last."""
    return client.worker.steps[-1].sequences[0].sample


def test_how_answers_are_drawn(tmp_path: Path) -> None:
    """Against what the worker is told: the checkpoint's settings where the request says nothing."""

    async def session(client: Chats) -> None:
        client.answers("so")
        await client.whole()
        sample = sample_of(client)
        assert (sample.temperature, sample.top_p, sample.top_k) == (0.5, 0.75, 20)
        await client.whole(temperature=0.25, top_p=1, top_k=-1, seed=7)
        sample = sample_of(client)
        assert (sample.temperature, sample.top_p, sample.top_k, sample.seed) == (0.25, 1.0, 0, 7)

    talk(tmp_path, PLAIN, session, temperature=0.5, top_p=0.75, top_k=20, max_length=3, do_sample=None)


def test_how_long_answers_are(tmp_path: Path) -> None:
    """Against the rules: what the model's length leaves, if nothing is said."""

    async def session(client: Chats) -> None:
        client.answers("aaaa bbbb " * 2000)
        status, reply = await client.post()
        assert status == 200 and reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["total_tokens"] == 600
        for request in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
            status, reply = await client.post(**request)
            assert reply["usage"]["completion_tokens"] == 3
        error = await client.refused(messages=[{"role": "user", "content": "🦊x" * 400}])
        assert error["code"] == "context_length_exceeded" and "600" in error["message"]
        assert (await client.refused(max_tokens=3, max_completion_tokens=4))["param"] == "max_tokens"

    write_chat_model(tmp_path, PLAIN)

    async def main() -> None:
        async with chats(tmp_path, max_model_len=600) as client:
            await session(client)

    on_loop("selector", main)


def test_logprobs_have_the_bytes_of_each_token(tmp_path: Path) -> None:
    """Of a character in several tokens too: the bytes add up to the answer."""

    async def session(client: Chats) -> None:
        client.answers("<think>é</think>a🦊語")
        whole = await client.whole(logprobs=True, top_logprobs=2)
        places = whole["logprobs"]["content"]
        ended = b"".join(bytes(place["bytes"]) for place in places)
        assert ended == "<think>é</think>a🦊語<|end|>".encode()
        assert all(len(place["top_logprobs"]) == 2 and place["logprob"] <= 0 for place in places)
        assert any("\ufffd" in place["token"] for place in places)
        assert await client.streamed(logprobs=True, top_logprobs=2) == whole
        assert (await client.whole(logprobs=True))["logprobs"]["content"][0]["top_logprobs"] == []
        assert (await client.refused(top_logprobs=2))["param"] == "top_logprobs"

    talk(tmp_path, JSON_CALLS, session)


def test_several_answers_and_usage(tmp_path: Path) -> None:
    async def session(client: Chats) -> None:
        client.answers("<think>a</think>the fox")
        status, reply = await client.post(n=3)
        assert status == 200 and [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert {choice["message"]["content"] for choice in reply["choices"]} == {"the fox"}
        _, events = await client.post(n=3, stream=True, stream_options={"include_usage": True})
        assert (
            events[-1]["choices"] == []
            and events[-1]["usage"]["completion_tokens"] == reply["usage"]["completion_tokens"]
        )
        assert all(event["usage"] is None for event in events[:-1])
        assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1, 2}
        options = {"include_usage": True, "continuous_usage_stats": True}
        _, events = await client.post(stream=True, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and counts[0] == 0 and len(set(counts)) > 3
        _, events = await client.post(stream=True)
        assert all("usage" not in event for event in events)
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1

    talk(tmp_path, JSON_CALLS, session)


IMAGE = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
USER = {"role": "user", "content": "x"}
CALLS = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"items": DEEP}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
    ({"messages": [USER, {"role": "user", "content": IMAGE}]}, "messages[1].content[0]: image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": CALLS}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
    ({"messages": [{"role": "assistant", "content": "x", "function_call": {}}]}, "function_call"),
    ({"audio": {}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prediction": {}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"functions": []}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"verbosity": "low"}, "verbosity"),
    ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"nothing": 1}}, "chat_template_kwargs.nothing"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"message": 1}}, "chat_template_kwargs.message is"),
    ({"chat_template_kwargs": {"namespace": 1}}, "chat_template_kwargs.namespace"),
    ({"chat_template_kwargs": {"eos_token": "x"}}, "chat_template_kwargs.eos_token"),
    ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs.continue_final_message"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": TOOLS * 2}, "tools[1]"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f g"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x-guidance": {}}}}]}, "x-guidance"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "tools[0].function.parameters"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 21, "logprobs": True}, "logprobs"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
]


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    async def session(client: Chats) -> None:
        for request, named in REFUSED:
            error = await client.refused(**request)
            assert named in error["message"], (request, error)
            assert error["type"] == "invalid_request_error"

    talk(tmp_path, JSON_CALLS, session)


def test_names_that_clients_make_up_are_cut_in_errors(tmp_path: Path) -> None:
    """Against the bound: no error is as long as what was sent."""
    long = "n" * 50_000
    schemas: list[dict[str, Any]] = [{long: 1}, {"properties": {long: {long: 1}}}, {"properties": {f"{long}>": {}}}]
    requests: list[dict[str, Any]] = [
        {"chat_template_kwargs": {long: 1}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": long}}},
        *(
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]}
            for schema in schemas
        ),
    ]

    async def session(client: Chats) -> None:
        for request in requests:
            error = await client.refused(**request)
            assert "nnn" in error["message"] and len(json.dumps(error)) < 1000

    talk(tmp_path, XML_CALLS, session)


def test_tools_need_a_template_that_knows_them(tmp_path: Path) -> None:
    async def session(client: Chats) -> None:
        assert "tools" in (await client.refused(tools=TOOLS))["message"]

    talk(tmp_path, PLAIN, session)
    talk(tmp_path, PLAIN + "{{ tools | tojson }}", session)


def test_labels_are_not_decoded() -> None:
    """However much there is in one, it is only skipped; but it is JSON."""
    body = b'{"messages": [], "metadata": [%s]}' % b",".join([b"{}"] * 1000)
    found = msgspec.json.decode(body, type=ChatRequest).metadata
    assert isinstance(found, msgspec.Raw) and len(bytes(found)) == 3001
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(b'{"messages": [], "metadata": [1}', type=ChatRequest)


def test_labels_and_nulls_change_nothing(tmp_path: Path) -> None:
    async def session(client: Chats) -> None:
        client.answers("so")
        names = (
            "tools",
            "tool_choice",
            "response_format",
            "logprobs",
            "n",
            "stop",
            "max_tokens",
            "seed",
            "stream_options",
            "functions",
            "function_call",
            "audio",
            "prediction",
            "web_search_options",
            "verbosity",
            "prompt_cache_retention",
            "modalities",
        )
        labels = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k"}
        whole = await client.whole(**dict.fromkeys(names), **labels, safety_identifier="s")
        assert whole == await client.whole(modalities=["text"])
        assert whole == await client.streamed(stream_options={"include_obfuscation": False})

    talk(tmp_path, PLAIN, session)
