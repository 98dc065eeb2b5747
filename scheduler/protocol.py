"""Messages to and from the scheduler. Imports the standard library and msgspec only."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

# Requests -----------------------------------------------------------------------------------------------------------


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: str
    content: str


class Sampling(Struct, frozen=True, forbid_unknown_fields=True):
    """How the answer is drawn and where it ends.

    temperature 0 is greedy; top_k 0 is off; seed None draws a fresh one for the request. The answer ends at an
    end-of-sequence token (unless `ignore_eos`), at a token of `stop_token_ids`, before the first match of a string
    of `stop`, or after `max_tokens` new tokens; None is 256 or what the prompt leaves of the model's length, whichever
    is less. The token that ends an answer counts as a new token and is sent, but its text is not.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class Generate(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Answer one prompt, given as exactly one of text, token ids or chat messages."""

    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[Message] | None = None
    sampling: Sampling = Sampling()
    request_id: Annotated[str, Meta(max_length=128)] = (
        ""  # chosen by the client for Abort; "" lets the scheduler choose
    )


class Abort(Struct, frozen=True, tag=True):
    """End a request of this client's; its Generate gets Finished("abort")."""

    request_id: str


class Health(Struct, frozen=True, tag=True):
    """Ask whether requests are accepted."""


class Stats(Struct, frozen=True, tag=True):
    """Ask for the counters."""


Request = Generate | Abort | Health | Stats

# Replies ------------------------------------------------------------------------------------------------------------


class Accepted(Struct, frozen=True, tag=True):
    """Not final: the request is queued."""

    request_id: str
    prompt_tokens: int


class Tokens(Struct, frozen=True, tag=True):
    """Not final: new tokens, in the order they were drawn.

    `text` holds whole characters only; the pieces concatenate to the answer. Text that may turn out to begin a stop
    string or an unfinished character comes later than its token, so either may be empty. Both are empty when a reply
    only says that the request still waits.
    """

    text: str
    token_ids: list[int]


class Usage(Struct, frozen=True):
    """What the request took.

    `cached_tokens` are prompt tokens whose KV was already there. Chunks count every prefill step that the request took
    part in. Expert figures are over prefill and decode. A step shared by several requests is split among them by their
    tokens in it, and the shares add up to the step's figures in Stats. So the figures of all requests add up to those
    in Stats if none was aborted or failed: an aborted one lacks its share of the step that was out when it ended, a
    failed one reports no figures.
    """

    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    demand_chunks: int
    streamed_chunks: int
    expert_hits: int
    expert_misses: int
    copied_nbytes: int


class Timing(Struct, frozen=True):
    """Seconds. `queued_s` from arrival to the first chunk, `ttft_s` from arrival to the first token, `total_s` from
    arrival to the end; `tpot_s` the mean gap between the later tokens. 0 for what did not happen."""

    queued_s: float
    ttft_s: float
    tpot_s: float
    total_s: float


class Finished(Struct, frozen=True, tag=True):
    """The answer is complete."""

    reason: Literal["stop", "length", "abort"]
    usage: Usage
    timing: Timing


class HealthReply(Struct, frozen=True, tag=True):
    """`phase` says why `ready` is false."""

    ready: bool
    phase: Literal["loading", "ready", "draining", "dead"]
    model: str


class ModeCounters(Struct, frozen=True):
    """Steps and expert traffic of one mode, over all workers. hits + misses = lookups.

    Of steps that succeeded: what a failed step copied is in its worker's own counters alone.
    """

    steps: int = 0
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    copied_nbytes: int = 0


class StatsReply(Struct, frozen=True, tag=True):
    """Counters since the start.

    An accepted request is `waiting` or `running` and ends in exactly one of `finished`, `failed` and `aborted`, counted
    with its last reply; `aborted` are also those whose client left before their end. `prompt_tokens` are those of
    all accepted requests, `generated_tokens` those that were sent.
    """

    waiting: int
    running: int
    finished: int
    failed: int
    aborted: int
    prompt_tokens: int
    generated_tokens: int
    kv_pages_free: int
    kv_pages_total: int
    decode: ModeCounters
    demand: ModeCounters
    streamed: ModeCounters
    dropped_frames: int


class Done(Struct, frozen=True, tag=True):
    """Abort went through (also when the request had ended already)."""


class Failed(Struct, frozen=True, tag=True):
    """The request ended with an error.

    Codes: wire (malformed or unknown fields), invalid_request, duplicate_request, no_tokenizer (only token_ids can be
    served), no_chat_template, context_length_exceeded, queue_full, not_ready, draining, bad_logits
    (the model computes NaN or infinity), worker_failed, internal.
    """

    code: str
    detail: str


Reply = Accepted | Tokens | Finished | HealthReply | StatsReply | Done | Failed
FINAL = (Finished, HealthReply, StatsReply, Done, Failed)
