"""Chats with the HTTP app in this process, over a scheduler whose worker answers by a script."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scheduler.tokenize import MARKERS
from tests.scheduler.http.rig import HttpRig, serving
from tests.scheduler.rig import CORPUS, EOS_TEXT, train_tokenizer
from worker.protocol import RunStep, StepDone


def write_chat_model(directory: Path, template: str, special: bool = False, **generation: Any) -> Path:
    """The text files of a checkpoint with this template, whose markers are tokens."""
    tokenizer = train_tokenizer(CORPUS)
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(list(MARKERS))
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": EOS_TEXT, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    (directory / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    (directory / "config.json").write_text("{}", "utf-8")
    return directory


class Chats:
    """A client of /v1/chat/completions, and what the engine was asked for."""

    def __init__(self, rig: HttpRig, tokenizer: Tokenizer) -> None:
        self.worker: Any = rig.engine.worker
        self._rig = rig
        self._tokenizer = tokenizer

    def answers(self, text: str) -> None:
        """From now on every answer is this text, and ends."""
        script: list[int] = self._tokenizer.encode(text + EOS_TEXT, add_special_tokens=False).ids
        worker = self.worker
        step = type(worker)._step
        said: dict[int, int] = {}

        async def scripted(order: RunStep) -> StepDone:
            done = await step(worker, order)
            tokens = list(done.tokens)
            for i, sequence in enumerate(order.sequences):
                if sequence.sample is not None:
                    at = said.get(sequence.sequence, 0)
                    tokens[i], said[sequence.sequence] = script[min(at, len(script) - 1)], at + 1
            return StepDone(tokens, done.stats, done.logprobs, resident=done.resident)

        worker._step = scripted

    def prompt(self) -> str:
        """The text of the last prompt that the worker was given."""
        prompts = [one.tokens for order in self.worker.steps for one in order.sequences if one.start == 0]
        text: str = self._tokenizer.decode(prompts[-1], skip_special_tokens=False)
        return text

    async def post(self, **request: Any) -> tuple[int, Any]:
        """Status and body; of a stream the data of its events."""
        body = {"messages": [{"role": "user", "content": "the fox"}]} | request
        response = await self._rig.post("/v1/chat/completions", **body)
        if "event-stream" not in response.headers["content-type"]:
            return response.status_code, response.json()
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return response.status_code, [json.loads(event.removeprefix("data: ")) for event in events]

    async def stream(self, **request: Any) -> list[str]:
        """The data of a stream's events, however it ends."""
        body = {"messages": [{"role": "user", "content": "the fox"}], "stream": True} | request
        response = await self._rig.post("/v1/chat/completions", **body)
        return [event.removeprefix("data: ") for event in response.text.split("\n\n")[:-1]]

    async def whole(self, **request: Any) -> dict[str, Any]:
        """The one choice of an answer."""
        status, reply = await self.post(**request)
        assert status == 200, reply
        (choice,) = reply["choices"]
        return dict(choice)

    async def streamed(self, **request: Any) -> dict[str, Any]:
        """The same, added up from a stream."""
        status, events = await self.post(stream=True, **request)
        assert status == 200, events
        return added_up([event["choices"][0] for event in events if event["choices"]])

    async def refused(self, **request: Any) -> dict[str, Any]:
        """The error that a request is refused with."""
        status, reply = await self.post(**request)
        assert status == 400, reply
        return dict(reply["error"])


def added_up(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of one choice's deltas: the choice as it is where nothing is streamed."""
    assert parts[0]["delta"] == {"role": "assistant", "content": ""}
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    message: dict[str, Any] = {"role": "assistant", "refusal": None, "content": ""}
    calls: list[dict[str, Any]] = []
    for delta in (part["delta"] for part in parts[1:]):
        for name in ("content", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            function = call.pop("function")
            if call.pop("index") == len(calls):
                calls.append({**call, "function": {"name": function.pop("name"), "arguments": ""}})
            calls[-1]["function"]["arguments"] += function.pop("arguments")
            assert not function
    if calls:
        message["tool_calls"] = calls
    message["content"] = message["content"] or (None if len(message) > 3 else "")
    places = [place for part in parts if part["logprobs"] for place in part["logprobs"]["content"]]
    logprobs = {"content": places, "refusal": None} if places else None
    last = parts[-1]
    return {"index": last["index"], "message": message, "logprobs": logprobs, "finish_reason": last["finish_reason"]}


@contextlib.asynccontextmanager
async def chats(directory: Path, **settings: Any) -> AsyncIterator[Chats]:
    """A front over a running scheduler, with `settings`, for the model in `directory`."""
    async with serving(directory, engine={"disable_prefix_cache": True, **settings}) as rig:
        yield Chats(rig, Tokenizer.from_file(str(directory / "tokenizer.json")))
