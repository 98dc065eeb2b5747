"""Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}` and a status."""

import re
from typing import Literal

import msgspec
from msgspec import Struct
from starlette.responses import Response

from copyengine.wire.errors import PeerError, PeerTimeout, RequestRefused, SlotstreamError
from scheduler.http.wording import Wording
from scheduler.protocol import HealthReply

Kind = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "rate_limit_error",
    "service_unavailable",
    "server_error",
]

RETRY_QUEUE_S = 1
"""Retry-After of a queue that is full, in seconds: a place is free again within a few steps."""

RETRY_START_S = 5
"""Of an engine that loads or restarts: a small model is back by then, of a large one the client asks some times."""


MAX_MESSAGE_CHARS, MAX_NAME_CHARS = 2000, 200
"""Of a message and a field's name: clients' own words are sent back in both."""


class ErrorBody(Struct, frozen=True):
    """What went wrong. `param` names the field of the request that is wrong, `code` is for programs."""

    message: str
    type: Kind
    param: str | None
    code: str | None


class ErrorReply(Struct, frozen=True):
    """The body of every answer that is an error, and the data of an error in a stream."""

    error: ErrorBody


class ApiError(Exception):
    """One HTTP request ends with `status` and `body`."""

    def __init__(
        self,
        status: int,
        kind: Kind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        message = _cut(message, MAX_MESSAGE_CHARS)
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.body = ErrorReply(ErrorBody(message, kind, param and _cut(param, MAX_NAME_CHARS), code))
        self.headers: dict[str, str] = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}

    def encode(self) -> bytes:
        """The body as JSON."""
        return msgspec.json.encode(self.body)

    def response(self) -> Response:
        """The answer of a request that has had none yet."""
        return Response(self.encode(), self.status, self.headers, "application/json")


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 3] + "..."


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, "invalid_request_error", message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    """400: a field asks for what we do not have."""
    return invalid(f"{param} is not supported: {why}", param, "unsupported_parameter")


def unknown_model(name: str, served: str) -> ApiError:
    """404: another model than the one served is asked for."""
    message = f"The model {name!r} does not exist; this engine serves {served!r}"
    return ApiError(404, "not_found_error", message, param="model", code="model_not_found")


def engine_unavailable(health: HealthReply | None) -> ApiError:
    """503: the engine takes no requests now, as it says itself, or does not answer (None)."""
    if health is None:
        return _unavailable("engine_silent", "the engine does not answer: it is started anew, or busy beyond measure")
    match health.phase:
        case "loading":
            return _unavailable("not_ready", f"the model is still loading{progress_of(health)}")
        case "restarting":
            return _unavailable("not_ready", f"a worker is started anew{progress_of(health)}")
        case "draining":
            return draining()
    return _unavailable("dead", "no worker lives")


def queue_full(places: int) -> ApiError:
    """429: what has come before this request leaves it too few of the engine's places."""
    message = (
        f"{places} answers may run or wait at a time (--max-running-requests, --max-queued-requests), "
        "and what was asked for before leaves too few for this request"
    )
    return _too_many(message)


def not_loaded() -> ApiError:
    """503: something about the model is not known yet."""
    return _unavailable("not_ready", "the model is still loading")


def progress_of(health: HealthReply) -> str:
    """How far a load is, in words that follow others; empty if nothing is known."""
    if not health.total_nbytes:
        return f": {health.loading}" if health.loading else ""
    return f": {health.loading}, {health.done_nbytes / 1e6:,.0f} of {health.total_nbytes / 1e6:,.0f} MB"


def draining(why: str = "the engine finishes what runs and takes nothing new") -> ApiError:
    """503: the engine is stopping."""
    return _unavailable("draining", why)


def internal(request_id: str) -> ApiError:
    """500: a bug of ours, of which the log has the details under the id."""
    return ApiError(500, "server_error", f"internal error; the engine's log has it under {request_id}", code="internal")


def malformed(error: msgspec.DecodeError) -> ApiError:
    """400: a body that is no JSON, or not what the endpoint takes."""
    if not isinstance(error, msgspec.ValidationError):
        return invalid(f"the body is not valid JSON: {error}", code="malformed_json")
    text = str(error).replace("`", "'")
    reason, _, place = text.rpartition(" - at '") if " - at '" in text else (text, "", "")
    field = place.partition("$")[2].strip("'").removeprefix(".")
    if place.startswith("key'"):
        reason = f"a key: {reason}"
    named = re.search(r"(unknown|missing required) field '(.*)'", reason, re.DOTALL)
    if named is None:
        return invalid(f"{field}: {reason}" if field else reason, field or None)
    param = _cut(".".join(filter(None, (field, named[2]))), MAX_NAME_CHARS)
    if named[1] == "unknown":
        return invalid(f"{param} is not supported: no such field is known", param, "unsupported_parameter")
    return invalid(f"{param} is required", param, "missing_required_parameter")


_PATHS = re.compile(r"(?<![\w/.:])(?:[A-Za-z]:[\\/]|\\\\|~/|/)[^\s'\",;:)]+")
"""What looks like a path of a machine."""


def without_paths(text: str) -> str:
    """`text` without what looks like a path: who asks over HTTP need not know this machine's files."""
    return _PATHS.sub("(a file)", text)


def api_error(error: SlotstreamError, request_id: str, wording: Wording | None = None) -> ApiError:
    """What the client is told of an error of the engine's, in the `wording` of its request.

    Of what is the client's own doing it learns the words; of what is not, which may name files of this machine, only
    the kind. Those words are the log's.
    """
    if isinstance(error, RequestRefused):
        return _refused(error, request_id, wording or Wording())
    if isinstance(error, PeerTimeout):
        return _unavailable("engine_silent", "the engine did not answer in time")
    if isinstance(error, PeerError):
        return _unavailable("engine_gone", "the engine is gone, and is started anew if launch.py started it")
    return internal(request_id)


def _refused(error: RequestRefused, request_id: str, wording: Wording) -> ApiError:
    match error.code:
        case "invalid_grammar":  # quotes the client's own regular expressions, which may look like paths
            return invalid(*wording.grammar(error.detail), error.code)
        case "invalid_request" | "no_tokenizer" | "no_chat_template" | "encode_timeout":
            return invalid(*wording.told(without_paths(error.detail)), error.code)
        case "context_length_exceeded":
            return invalid(*wording.too_long(without_paths(error.detail)), error.code)
        case "queue_full":
            return _too_many(without_paths(error.detail))
        case "busy":
            return ApiError(409, "invalid_request_error", without_paths(error.detail), code=error.code)
        case "not_ready":
            return _unavailable(error.code, "the model is still loading, or a worker is started anew")
        case "draining":  # for who was running, that nothing new is taken would explain nothing
            return draining(without_paths(error.detail))
        case "too_slow":  # towards the engine this server is the client
            return _unavailable(error.code, "this server was held up for too long; ask again")
        case "worker_failed":
            return _unavailable(error.code, "the worker that computed the answer failed; ask again")
        case "device_out_of_memory":
            return _unavailable(error.code, "the device had too little memory left for this request; ask again")
        case "copy_damaged":
            return _unavailable(error.code, "an expert was found damaged before it was computed with; ask again")
        case "bad_logits":
            message = "the model computed something that is no number for this prompt"
            return ApiError(500, "server_error", message, code=error.code)
        case "text_failed":
            message = "the model's tokenizer cannot make text of the answer's tokens"
            return ApiError(500, "server_error", message, code=error.code)
        case "grammar_failed":
            message = "the answer got where its grammar allows nothing more, or is too much work to follow"
            return invalid(*wording.grammar(message), "invalid_grammar")
    return internal(request_id)


def _too_many(message: str) -> ApiError:
    return ApiError(429, "rate_limit_error", message, code="queue_full", retry_after_s=RETRY_QUEUE_S)


def _unavailable(code: str, message: str) -> ApiError:
    return ApiError(503, "service_unavailable", message, code=code, retry_after_s=RETRY_START_S)
