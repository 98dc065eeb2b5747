"""What becomes of an engine's error over HTTP: a status, a type and a code each, and no file of this machine."""

import msgspec
import pytest

from copyengine.wire.errors import ConfigError, PeerDied, PeerTimeout, RequestRefused, SlotstreamError, WireError
from scheduler.http.errors import (
    MAX_MESSAGE_CHARS,
    MAX_NAME_CHARS,
    api_error,
    invalid,
    malformed,
    unknown_model,
    without_paths,
)

SECRET = "/home/somebody/models/secret.safetensors"

CODES = {
    "invalid_request": (400, "invalid_request_error"),
    "no_tokenizer": (400, "invalid_request_error"),
    "no_chat_template": (400, "invalid_request_error"),
    "context_length_exceeded": (400, "invalid_request_error"),
    "encode_timeout": (400, "invalid_request_error"),
    "queue_full": (429, "rate_limit_error"),
    "not_ready": (503, "service_unavailable"),
    "draining": (503, "service_unavailable"),
    "too_slow": (503, "service_unavailable"),
    "worker_failed": (503, "service_unavailable"),
    "device_out_of_memory": (503, "service_unavailable"),
    "copy_damaged": (503, "service_unavailable"),
    "bad_logits": (500, "server_error"),
    "text_failed": (500, "server_error"),
    "grammar_failed": (400, "invalid_request_error"),
    "duplicate_request": (500, "server_error"),
    "internal": (500, "server_error"),
    "something new": (500, "server_error"),
}
OTHER_CODES = {"grammar_failed": "invalid_grammar"}


@pytest.mark.parametrize("code", CODES)
def test_each_code_of_the_engine_has_its_status(code: str) -> None:
    told = api_error(RequestRefused(code, f"cannot read {SECRET}: gone"), "req-1")
    assert (told.status, told.body.error.type) == CODES[code]
    ours = ("duplicate_request", "internal", "something new")
    assert told.body.error.code == ("internal" if code in ours else OTHER_CODES.get(code, code))
    assert ("retry-after" in told.headers) == (told.status in (429, 503))
    assert "secret" not in told.encode().decode() and "somebody" not in told.encode().decode()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (PeerDied(f"the scheduler at {SECRET} is gone"), 503, "engine_gone"),
        (PeerTimeout(f"no answer from {SECRET}"), 503, "engine_silent"),
        (WireError(SECRET), 500, "internal"),
        (ConfigError(SECRET), 500, "internal"),
    ],
)
def test_an_engine_that_is_gone(error: SlotstreamError, status: int, code: str) -> None:
    told = api_error(error, "req-1")
    assert (told.status, told.body.error.code) == (status, code) and "secret" not in told.encode().decode()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot read /srv/a b/c.json", "cannot read (a file) b/c.json"),
        ("'/srv/x': gone", "'(a file)': gone"),
        (r"C:\Users\me\x.json: gone", "(a file): gone"),
        (r"C:\Users\me\x.json, \\host\share\y", "(a file), (a file)"),
        ("~/models/x", "(a file)"),
        ("10 and/or 20 tokens/s, 1/2", "10 and/or 20 tokens/s, 1/2"),
        ("see https://example.org/x", "see https://example.org/x"),
        ("a prompt of 5 tokens", "a prompt of 5 tokens"),
    ],
)
def test_what_looks_like_a_path_is_left_out(text: str, shown: str) -> None:
    assert without_paths(text) == shown


def test_names_that_a_client_made_up_are_cut() -> None:
    class Body(msgspec.Struct, forbid_unknown_fields=True):
        a: int = 0

    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.json.decode(msgspec.json.encode({"x - at `$.y" * 9999: 1}), type=Body)
    told = malformed(error.value).body.error
    assert told.param and len(told.param) <= MAX_NAME_CHARS and len(told.message) < MAX_NAME_CHARS + 100


def test_words_of_a_client_are_cut_wherever_they_are() -> None:
    for error in (unknown_model("x" * 10**6, "m"), invalid("y" * 10**6, "z" * 10**6)):
        body = error.body.error
        assert len(body.message) == MAX_MESSAGE_CHARS and len(error.encode()) < MAX_MESSAGE_CHARS + MAX_NAME_CHARS + 200
    assert invalid("y" * MAX_MESSAGE_CHARS).body.error.message == "y" * MAX_MESSAGE_CHARS


def test_a_field_of_the_engines_words_is_named() -> None:
    told = api_error(RequestRefused("invalid_request", "token_ids[1] = 9 is not in the vocabulary of 8"), "req-1")
    assert (told.body.error.param, told.body.error.message[:10]) == ("prompt", "prompt[1] ")
    assert api_error(RequestRefused("invalid_request", "top_p 2 must be"), "req-1").body.error.param == "top_p"
    assert api_error(RequestRefused("invalid_request", "something else"), "req-1").body.error.param is None


def test_regular_expressions_are_quoted_as_they_are() -> None:
    """Some look like paths; they are the client's."""
    detail = r"bad regex: /^\/home\/[a-z]+$/, ~/x and C:\\d"
    told = api_error(RequestRefused("invalid_grammar", detail), "req-1")
    assert (told.status, told.body.error.code, told.body.error.message) == (
        400,
        "invalid_grammar",
        f"grammar: {detail}",
    )
