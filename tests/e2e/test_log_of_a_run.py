"""The log of a whole run, line by line, against ARCHITECTURE's table of events and against what its clients did."""

import asyncio
import contextlib
import re
import signal
from typing import Any

import httpx
import psutil
import pytest

from copyengine.wire.errors import SlotstreamError
from scheduler.client import Client
from scheduler.protocol import Message, Sampling
from tests.e2e.engine import Engine, running
from tests.log_lines import events, parse
from tests.test_log_events import documented

WORDS = "Xylophon"
"""What every text of a request has in it."""
IDS = [987654321, 31337, 27182]
"""What prompts of token ids have in them; the first is no token."""
KEY = "sesame-open-4711"
EVIL = "a\nevent=death detail=no\x1b[2J\u2028\x7f\x85"
"""A request's name, made to look like a line of its own."""

GRAMMAR = f'start: "{WORDS}"'
PEOPLE = re.compile(r"note: .*|making the built-in model .*|(worker\d+ )?[a-z ]+: [\d,]+ MB.*")
"""Lines that are launch.py's answer to who started it."""


async def asked(client: Client, request_id: str, **request: Any) -> None:
    """To its end, whatever that is."""
    with contextlib.suppress(SlotstreamError):
        async for _ in client.generate(request_id=request_id, **request):
            pass


async def by_zmq(engine: Engine) -> set[str]:
    """Every kind of end; the ids."""
    whole, endless = Sampling(max_tokens=3), Sampling(max_tokens=3000, ignore_eos=True)
    requests: dict[str, dict[str, Any]] = {
        EVIL: {"prompt": WORDS, "sampling": whole},
        "chat": {"messages": [Message("user", WORDS)], "sampling": whole},
        "stop": {"prompt": WORDS, "sampling": Sampling(max_tokens=3, stop=[WORDS])},
        "empty": {"prompt": ""},
        "ids": {"token_ids": IDS},
        "long": {"token_ids": [IDS[2] % 100] * 100_000},
        "both": {"prompt": WORDS, "token_ids": [5]},
        "grammar": {"prompt": WORDS, "sampling": Sampling(grammar=f"{GRAMMAR} {WORDS} [")},
        "held": {"prompt": WORDS, "sampling": Sampling(max_tokens=9, grammar=GRAMMAR)},
        "role": {"messages": [Message(WORDS, WORDS)], "sampling": whole},
        "range": {"prompt": WORDS, "sampling": Sampling(temperature=-float(IDS[0]))},
    }
    async with Client(engine.endpoint) as client:
        for request_id, request in requests.items():
            await asked(client, request_id, **request)
        async for _ in client.generate(prompt=WORDS, sampling=endless, request_id="broken off"):
            break
        worker = engine.child("worker0")
        with contextlib.suppress(SlotstreamError):
            async for _ in client.generate(prompt=WORDS, sampling=endless, request_id="killed"):
                with contextlib.suppress(psutil.NoSuchProcess):  # also for pieces that it has sent before
                    worker.kill()
        await asyncio.to_thread(engine.wait_serving_again, 1)
    return {*requests, "broken off", "killed"}


def by_http(engine: Engine) -> tuple[set[str], set[str]]:
    """The ids of those that the scheduler was asked, and of those that were not answered as they asked."""
    headers = {"authorization": f"Bearer {KEY}"}
    chat = {"messages": [{"role": "user", "content": WORDS}], "max_tokens": 3}
    bodies: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": WORDS, "max_tokens": 3}),
        ("/v1/completions", {"prompt": WORDS, "max_tokens": 3, "stream": True}),
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": IDS}),
        ("/v1/completions", {"prompt": WORDS, WORDS: 1}),
        ("/v1/completions", {"prompt": WORDS, "model": WORDS}),
        ("/v1/chat/completions", chat | {"response_format": {"type": WORDS}}),
        ("/v1/chat/completions", chat | {"chat_template_kwargs": {WORDS: WORDS}, "tools": [{"x": WORDS}]}),
        (f"/v1/{WORDS}", {}),
    ]
    good, bad = set[str](), set[str]()
    with httpx.Client(base_url=engine.url, headers=headers, timeout=60) as http:
        for path, body in bodies:
            reply = http.post(path, json=body)
            (good if reply.status_code == 200 else bad).add(reply.headers["x-request-id"])
        reply = http.post("/v1/completions", content=f'{{"{WORDS}'.encode())
        bad.add(reply.headers["x-request-id"])
        reply = http.get("/v1/models", headers={"authorization": f"Bearer {KEY}{WORDS}"})
        bad.add(reply.headers["x-request-id"])
    return good, bad


@pytest.mark.parametrize("level", ["debug", pytest.param("info", marks=pytest.mark.slow)])
def test_every_line_of_a_run_is_a_documented_event_without_a_request_s_words(cache: Any, level: str) -> None:
    """And each request, whether answered, refused, failed, aborted or left, has left one."""
    with running("--http-port", "0", "--api-key", KEY, "--log-level", level, "--slots", "64") as engine:
        by_id = asyncio.run(by_zmq(engine))
        good, bad = by_http(engine)
        endpoint = engine.endpoint
        assert engine.stop(signal.SIGTERM) == 0
    others = [line for line in engine.errors if parse(line) is None]
    assert all(PEOPLE.fullmatch(line) for line in others), others
    log, table = events(engine.errors), documented()
    for line in log:
        unnamed = [key for key in line.fields if not re.search(rf"\b{key}\b", table[line.event])]
        assert not unnamed, (line, unnamed)
    told = [line.fields["id"] for line in log if line.event == "request"]
    assert sorted(told) == sorted([*by_id, *(f"{one}-0" for one in good)])
    assert {line.fields["id"] for line in log if line.event == "http_error"} == bad and len(bad) == 8
    ends = {line.fields["id"]: line.fields["end"] for line in log if line.event == "request"}
    assert ends["killed"] == "worker_failed" and ends["broken off"] == "abort" and ends[EVIL] in ("stop", "length")
    assert all(ends[name] == "refused" for name in ("empty", "ids", "long", "both", "grammar", "range"))
    seen = [line.event for line in log if line.process == "launch" and line.event != "library"]
    assert seen == ["start", "ready", "death", "serving_again", "drain", "end"]
    assert events(engine.errors, "ready")[0].fields["endpoint"] == endpoint
    text = "\n".join(engine.errors)
    for secret in (re.escape(WORDS), re.escape(KEY), *(rf"\b{token}\b" for token in IDS)):  # ids may hold them
        assert not re.search(secret, text), [line for line in engine.errors if re.search(secret, line)]
    assert text.replace("\n", "").isprintable() and "Traceback" not in text
