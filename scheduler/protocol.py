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

    A token's logit first gets its `logit_bias` added (by token id). The repetition penalty, 1 if off, divides the
    positive logits of tokens of prompt and answer and multiplies the negative ones; of tokens of the answer alone,
    frequency_penalty is subtracted as often as they occur and presence_penalty once. Then temperature, 0 being greedy;
    top_k, 0 if off; min_p, which leaves out what is less likely than that share of the likeliest; top_p of the rest.
    seed None draws a fresh one for the request; the same seed draws the same answer, whatever else is served, but for
    near ties of logits in 16 bits, which a batch of another size may round otherwise without --deterministic.

    `logprobs` asks for the log-probability of each token and of so many likeliest ones, 0 included. Of `n` answers,
    answer i is drawn by seed + i; if one fails, all do.

    `grammar`, if not empty, is one in llguidance's Lark dialect, with a rule `start`, that the answer's text matches as
    a whole: of a JSON schema `start: %json {...}`. Before all of the above the logit of a token that the text cannot go
    on with becomes minus infinity; `logprobs` stay the model's own. Special tokens come only where the grammar names
    them, end-of-sequence tokens only where it allows an end; where it allows nothing else, the answer ends by itself.
    It is not whole if it ends by `max_tokens` ("length") or by one of `stop` or `stop_token_ids`.

    The answer ends at an end-of-sequence token (unless `ignore_eos`), at a token of `stop_token_ids`, before the first
    match of a string of `stop`, or after `max_tokens` new tokens; None is 256 or what the prompt leaves of the model's
    length, whichever is less. The token that ends an answer counts as a new token and is sent, but its text is not.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    n: int = 1
    grammar: str = ""


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


class Flush(Struct, frozen=True, tag=True):
    """Forget all that requests left behind: cached prefixes, snapshots of states, and which experts are in slots.

    The next request finds what the first one after a start finds. Answered with Done when that is so for all workers;
    refused with "busy" while any request, of whomever, has not ended.
    """


class Health(Struct, frozen=True, tag=True):
    """Ask whether requests are accepted."""


class Stats(Struct, frozen=True, tag=True):
    """Ask for the counters."""


class Activity(Struct, frozen=True, tag=True):
    """Ask what goes on at this moment."""


Request = Generate | Abort | Flush | Health | Stats | Activity

# Replies ------------------------------------------------------------------------------------------------------------


class Accepted(Struct, frozen=True, tag=True):
    """Not final: the request is queued."""

    request_id: str
    prompt_tokens: int


class TokenLogprob(Struct, frozen=True):
    """One token and the natural logarithm of its probability. `text` is that of the token alone, which for a part of a
    character is U+FFFD, and empty if the model has no tokenizer."""

    token_id: int
    logprob: float
    text: str


class Logprobs(Struct, frozen=True):
    """What the model said of one place: by its own logits, before bias, penalties and temperature."""

    drawn: TokenLogprob
    top: list[TokenLogprob]  # the likeliest ones, likeliest first


class Tokens(Struct, frozen=True, tag=True):
    """Not final: new tokens of one answer, in the order they were drawn.

    `text` holds whole characters only; the pieces concatenate to the answer. Text that may turn out to begin a stop
    string or an unfinished character comes later than its token, so either may be empty. Both are empty when a reply
    only says that the request still waits, which one whose text becomes tokens says before Accepted.
    """

    text: str
    token_ids: list[int]
    index: int = 0  # of the answer, of `n` ones
    logprobs: list[Logprobs] | None = None  # of each of token_ids, if they were asked for


class Usage(Struct, frozen=True):
    """What the request took.

    `cached_tokens` are prompt tokens whose KV was already there, in whole pages. Chunks count every prefill step that
    the request took part in. Expert figures are over prefill and decode. A step shared by several requests is split
    among them by their tokens in it, and the shares add up to the step's figures in Stats. So the figures of all
    requests add up to those in Stats if none was aborted or failed: an aborted one lacks its share of the step that was
    out when it ended, a failed one reports no figures.
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


Reason = Literal["stop", "length", "abort"]


class Choice(Struct, frozen=True):
    """How one of several answers ended."""

    reason: Reason
    usage: Usage
    timing: Timing


class Finished(Struct, frozen=True, tag=True):
    """The answer is complete.

    If there are several, `choices` says how each ended. Then `usage` is their sum, but for the prompt, which counts
    once, `timing` has the first start, first token and last end of any and the mean TPOT, and `reason` is "abort" or
    else "length" if it is that of any.
    """

    reason: Reason
    usage: Usage
    timing: Timing
    choices: list[Choice] = []


HealthPhase = Literal["loading", "ready", "draining", "restarting", "dead"]


class HealthReply(Struct, frozen=True, tag=True):
    """`phase` says why `ready` is false, and `detail`, of "restarting" and "dead", what the first worker died of.

    `max_model_len` and `vocab_size` are 0 until the model has loaded for the first time. `places` are the answers that
    may run or wait at a time; with one more its request is refused.

    `loading` names what is being read or allocated at this moment, with its worker where that is known of several, and
    is empty if nothing is: at the start, and while a worker that was started anew loads, which is in "restarting", or
    in "ready" or "draining" if another worker lives. Of that alone `done_nbytes` of `total_nbytes` are through; a load
    takes several of these one after the other. Of workers that load at the same time one is told.
    """

    ready: bool
    phase: HealthPhase
    model: str
    max_model_len: int = 0
    vocab_size: int = 0
    loading: str = ""
    done_nbytes: int = 0
    total_nbytes: int = 0
    detail: str = ""
    places: int = 0


class ModeCounters(Struct, frozen=True):
    """Steps and expert traffic of one mode. hits + misses = lookups.

    Of steps that succeeded: what a failed step copied is in its worker's own counters alone. `copy_wait_s` are the
    seconds in which the copy engine had copies of these steps under way, for several at once counted once: the most
    that computing can have waited for them, with what was computed meanwhile in it. `step_s` are the seconds from when
    these steps went out to when they were back. Of several workers both are sums.
    """

    steps: int = 0
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    copied_nbytes: int = 0
    copy_wait_s: float = 0.0
    step_s: float = 0.0


class WorkerCounters(Struct, frozen=True):
    """One worker's part of the counters since the start, those of the ones that had its place before included.

    One that is not `alive` takes no requests, or none yet. `resident_slots` of its `slots` held an expert after its
    last step; `stream_slots` are beside those. Each time that it was lost with the requests it had, or before it had
    loaded again, is one of its `restarts`: it died, was silent for too long, or could not be worked with for an error.
    `kv_pages_available` can be had at once: they are free, or cached and not used by any request. `failed_steps` ended
    the requests they carried while the worker went on: by code, "device_out_of_memory" and "copy_damaged" among them.
    """

    name: str
    alive: bool
    waiting: int
    running: int
    kv_pages_free: int
    kv_pages_cached: int
    kv_pages_total: int
    kv_pages_available: int
    resident_slots: int
    decode: ModeCounters
    demand: ModeCounters
    streamed: ModeCounters
    state_slots_free: int = 0
    state_snapshots: int = 0
    state_slots_total: int = 0
    state_nbytes: int = 0
    slots: int = 0
    stream_slots: int = 0
    restarts: int = 0
    failed_steps: dict[str, int] = {}


class StatsReply(Struct, frozen=True, tag=True):
    """Counters since the start.

    An accepted request is `waiting` or `running`, where each of several answers counts by itself, and ends in exactly
    one of `finished`, `failed` and `aborted`, counted with its last reply; `aborted` are also those whose client left
    before their end. Of those that failed, `not_finite` did because the model computed NaN or infinity. `refused`
    are the Generate that were not accepted. `prompt_tokens` are those of all accepted requests, `generated_tokens`
    those that were sent. `kv_pages_cached` are in the prefix cache, whether requests use them or not; those neither
    free nor cached are the own of running requests, and of some that ended while a step of theirs was out, until it
    is back. `kv_pages_available` can be had at once: they are free, or cached and not used by any request. Of the
    `queried_tokens` of prompts that were looked for in the prefix cache, for each of several answers,
    `cached_tokens` were not computed because their KV was cached; `preempted` counts each time that a request gave
    its pages back and waited again.

    Of a model with recurrent state, `state_snapshots` of the `state_slots_total` hold a state from which requests may
    go on; those neither free nor that are the own of running requests, or being written by the step that is out.
    `state_nbytes` are those of all slots.

    `slots` and `stream_slots` are those of all workers, as really allocated, and `restarts` count losses of any.
    `bank_nbytes` of host memory hold the experts of all layers, once for all workers; of these `pinned_nbytes` are
    copied by the GPUs themselves, none on the CPU.
    """

    waiting: int
    running: int
    finished: int
    failed: int
    aborted: int
    refused: int
    prompt_tokens: int
    generated_tokens: int
    kv_pages_free: int
    kv_pages_cached: int
    kv_pages_total: int
    kv_pages_available: int
    cached_tokens: int
    queried_tokens: int
    preempted: int
    decode: ModeCounters
    demand: ModeCounters
    streamed: ModeCounters
    dropped_frames: int
    workers: list[WorkerCounters]
    state_slots_free: int = 0
    state_snapshots: int = 0
    state_slots_total: int = 0
    state_nbytes: int = 0
    slots: int = 0
    stream_slots: int = 0
    restarts: int = 0
    bank_nbytes: int = 0
    pinned_nbytes: int = 0
    not_finite: int = 0


class RunningRequest(Struct, frozen=True):
    """An accepted request that has not ended; each of several answers to one is listed by itself.

    In "prefill" its prompt is computed, and what it had answered before it was preempted, if it was; it is "waiting"
    before it is admitted to its worker and while it is preempted. The KV of the first `computed_tokens` of its prompt
    and answer is there, computed or taken from the prefix cache, but for what the step that is out computes.
    """

    request_id: str  # as its client gave it, or as the scheduler chose it; another client may have the same
    phase: Literal["waiting", "prefill", "decode"]
    prompt_tokens: int
    computed_tokens: int
    new_tokens: int  # of the answer
    age_s: float  # since it arrived
    worker: str
    index: int = 0  # of the answer, of `n` ones


class WorkerResidency(Struct, frozen=True):
    """Which experts were in a worker's cache slots `age_s` ago, when it last stood between two steps and was asked.

    That is bit e % 8, the lowest being 0, of byte e // 8 of each layer's row.
    """

    name: str
    layers: int  # L, 0 for a dense model
    experts: int  # E
    resident: bytes  # [L, ceil(E / 8)]
    age_s: float


class ActivityReply(Struct, frozen=True, tag=True):
    """Requests in the order of their arrival, those that wait behind all others, and the slots of each worker.

    At most 256 requests are listed, `left_out` are not. A worker that is down, or has not answered since it was
    started, has no entry. One that computes is waited for a second, and then has its last answer here; an answer
    younger than half a second is as good as a new one.
    """

    requests: list[RunningRequest]
    residency: list[WorkerResidency]
    left_out: int = 0


class Done(Struct, frozen=True, tag=True):
    """Flush or Abort went through (the latter also when the request had ended already)."""


class Failed(Struct, frozen=True, tag=True):
    """The request ended with an error.

    Codes: wire (malformed or unknown fields), invalid_request, duplicate_request, no_tokenizer (only token_ids can be
    served), no_chat_template, context_length_exceeded, encode_timeout (the text took too long to become tokens),
    invalid_grammar (it does not compile, or takes too long to), queue_full, busy (requests have not ended), not_ready,
    draining, too_slow (the client does not read what it is sent), bad_logits (the model computes NaN or infinity),
    grammar_failed (an answer got where its grammar allows nothing or is too much work), text_failed (the tokenizer
    cannot decode the answer), device_out_of_memory (its step did not fit in what the device had left), copy_damaged (an
    expert was not what was loaded; with --verify-copies), worker_failed, internal (a bug of ours). Of an error that
    nobody foresaw the detail names the type alone.
    """

    code: str
    detail: str


Reply = Accepted | Tokens | Finished | HealthReply | StatsReply | ActivityReply | Done | Failed
FINAL = (Finished, HealthReply, StatsReply, ActivityReply, Done, Failed)
