"""The served description against what is served: schemathesis sends what it allows, and what it does not."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from scheduler.client import Client
from tests.bench import front_alone
from tests.e2e.engine import Engine, running

COMMAND = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)
"""Not that all is served which the schemas allow: they do not know the model's length, vocabulary and tokenizer."""

KEY = "open-sesame"
FUZZ_TIMEOUT_S = 280


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Short answers only, however long they may be asked for."""
    flags = ("--slots", "64", "--chunked-prefill-size", "128", "--max-model-len", "48", "--max-running-requests", "128")
    with running(*flags, "--http-port", "0", "--api-key", KEY) as engine:
        yield engine


def described_at(engine: Engine) -> str:
    """The description's address."""
    return engine.fact("HTTP").removesuffix("/v1") + "/openapi.json"


def fuzz(url: str, directory: Path, *flags: str) -> str:
    """What schemathesis finds, and all that it says of it; nothing if it finds nothing."""
    argv = [url, "--checks", ",".join(CHECKS), "--header", f"Authorization: Bearer {KEY}", "--seed", "1", *flags]
    argv += ["--request-timeout", "60", "--warnings", "off", "--no-color"]
    done = subprocess.run(
        [*COMMAND, *argv], cwd=directory, capture_output=True, text=True, timeout=FUZZ_TIMEOUT_S, check=False
    )
    assert " generated" in done.stdout, done.stdout + done.stderr
    return done.stdout + done.stderr if done.returncode else ""


def all_over(engine: Engine) -> None:
    """Nothing runs any more and nothing was an internal error."""

    async def session(client: Client) -> None:
        stats = await client.stats()
        assert (stats.waiting, stats.running, stats.failed) == (0, 0, 0)

    engine.over(session)
    assert "Traceback" not in engine.text()


def test_what_is_served_is_what_is_described(engine: Engine, tmp_path: Path) -> None:
    found = fuzz(described_at(engine), tmp_path, "--phases", "fuzzing,stateful", "--max-examples", "4")
    assert not found, found
    all_over(engine)


@pytest.mark.slow
def test_the_same_at_the_limits_and_with_many_examples(engine: Engine, tmp_path: Path) -> None:
    found = fuzz(described_at(engine), tmp_path, "--max-examples", "100")
    assert not found, found
    all_over(engine)


def test_every_limit_that_is_described_is_kept(tmp_path: Path) -> None:
    """One value on each side of each limit, hundreds in all: of a model that takes no time, and short answers."""
    with front_alone.rig(0.0, ["--api-key", KEY], max_model_len=64) as rig:
        found = fuzz(f"http://127.0.0.1:{rig.port}/openapi.json", tmp_path, "--phases", "coverage")
    assert not found, found


def test_the_description_asks_for_the_key_and_says_so(engine: Engine) -> None:
    url = described_at(engine)
    assert httpx.get(url).status_code == 401
    described = httpx.get(url, headers={"authorization": f"Bearer {KEY}"}).json()
    assert described["openapi"] == "3.1.0"
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "n": 2}),
    ],
)
def test_events_are_as_described(engine: Engine, path: str, body: dict[str, Any]) -> None:
    """Which schemathesis does not look into: by the schema of what `data` holds."""
    headers = {"authorization": f"Bearer {KEY}"}
    described = httpx.get(described_at(engine), headers=headers).json()
    content = described["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    told = content["schema"]["properties"]["data"]["anyOf"][0]["contentSchema"]
    schema = jsonschema_rs.validator_for({**told, **described})
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**body, "max_tokens": 4, "stream": True, "stream_options": options}
    url = engine.fact("HTTP").removesuffix("/v1") + path
    *events, done, end = httpx.post(url, json=asked, headers=headers, timeout=30).text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "") and len(events) >= 8
    for event in events:
        schema.validate(json.loads(event.removeprefix("data: ")))
    assert not schema.is_valid({"id": "x"})
