"""JSON bodies of all routes, by way of the app itself: an answer, or an error with a status and a code, never a 500."""

import asyncio
import json
from typing import Any

from tests.fuzz.live_engine import LiveEngine
from tests.fuzz.source import Source, as_json, changed

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": FUNCTION}
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"], "additionalProperties": False},
    {
        "type": "array",
        "items": {"$ref": "#/$defs/x"},
        "maxItems": 3,
        "$defs": {"x": {"type": "string", "pattern": "^a+$"}},
    },
    {"anyOf": [{"const": None}, {"type": "number", "minimum": 0, "multipleOf": 0.5}]},
    {"$ref": "#"},
    {"type": "string", "format": "date-time", "minLength": 3},
]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOLD = {"role": "tool", "tool_call_id": "c", "content": "1"}
MESSAGES: list[Any] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]}, TOLD],
]
SAMPLING = {
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "n": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
}
CHAT = {**SAMPLING, "logprobs": True, "top_logprobs": 2, "stream": False, "tool_choice": "auto"}
ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/flush_cache",
    "/v1/models/x",
    "/live",
)
HEADERS = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]


def one_input(data: bytes) -> None:
    source = Source(data)
    path = source.pick(ROUTES)
    body = as_json(source, changed(source, _body(source, path)))
    method = "GET" if path in ("/v1/models/x", "/live") else "POST"
    engine = LiveEngine.running()
    status, answer = engine.over(_ask(engine, method, path, body))
    assert 200 <= status < 500 or status in (501, 503), (status, answer[:500], body)
    if status >= 400:
        error = json.loads(answer)["error"]
        assert error["message"] and error["type"] and "Traceback" not in error["message"], error


def _body(source: Source, path: str) -> Any:
    match path:
        case "/v1/chat/completions":
            body: dict[str, Any] = {
                "messages": source.pick(MESSAGES),
                **(CHAT if source.byte() & 1 else {"max_tokens": 2}),
            }
            if source.byte() < 128:
                body["tools"] = [TOOL]
            if source.byte() < 128:
                body["tool_choice"] = source.pick(("none", "required", {"type": "function", "function": {"name": "f"}}))
            if source.byte() < 128:
                schema = {"name": "s", "schema": changed(source, source.pick(SCHEMAS)), "strict": True}
                body["response_format"] = {"type": "json_schema", "json_schema": schema}
            return body
        case "/v1/completions":
            return {"prompt": source.pick(("a b", ["a", "b"], [5, 6], [[5], [6, 7]])), **SAMPLING}
        case "/tokenize":
            return source.pick(({"prompt": "a"}, {"messages": MESSAGES[0], "add_generation_prompt": True}))
        case "/detokenize":
            return {"tokens": [5, 6, 7]}
    return {}


async def _ask(engine: LiveEngine, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """The app's answer: status and body."""
    sent: list[Any] = []
    gone = asyncio.Event()
    bodies = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if bodies:
            return bodies.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": HEADERS,
        "http_version": "1.1",
    }
    scope |= {"scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "extensions": {}}
    await engine.rig.server.config.loaded_app(scope, receive, send)
    gone.set()
    assert sent and sent[0]["type"] == "http.response.start", sent
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
