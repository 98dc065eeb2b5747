"""Messages to and from a worker. Imports the standard library and msgspec only."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Mode = Literal["decode", "demand", "streamed"]
"""What a step is: one new token for each sequence, or a prefill chunk with its experts on demand or streamed."""

LOGGED_STEPS = 128
"""Decode and demand steps whose routing is logged after each LayerStats, if the Load asks for it: 3 MB of 48 layers of
512 experts."""

NOT_FINITE = -2
"""In place of a token: what a step computed of a sequence is not a number somewhere, or infinite."""

STATE_CUT_TOKENS = 64
"""A prompt of a model with recurrent state may be cut at multiples of this, and its state kept there and gone on from,
and a deterministic worker computes the same bits: there the pieces begin that it takes a prompt in by."""

# Requests -----------------------------------------------------------------------------------------------------------


class Load(Struct, frozen=True, tag=True):
    """Load the model and everything it needs; the copy engine is asked for the expert banks."""

    model: str
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    hf_overrides: str = "{}"
    slots: int = 0  # 0: auto
    kv_tokens: int = 0  # 0: auto
    page_tokens: int = 16  # tokens in a KV page
    max_step_tokens: int = 4096  # T of the largest step that will be sent
    max_running: int = 1  # sequences of the largest decode step that will be sent
    state_slots: int = 0  # recurrent states to keep: of sequences that run, and snapshots; 0: auto
    vram_reserve_nbytes: int = 0  # of a GPU, to stay free, contexts included; 0: auto
    embedding_placement: Literal["device", "host"] = "device"
    kv_placement: Literal["device", "host"] = "device"
    load_format: Literal["auto", "dummy"] = "auto"
    expert_activations: Literal["plain", "w4a4"] = "plain"  # w4a4: rounded to FP4 before experts of that
    cache_policy: Literal["lru", "lrfu"] = "lru"
    log_routing: bool = False  # for LayerStatsReply.oracle
    verify_copies: bool = False  # every expert is compared with its bank's checksum before it is computed with
    demand_prefill: bool = True  # demand chunks will come: the pool must hold min(E, 128) experts
    deadline_s: float = 120.0  # seconds without progress after which the copy engine is given up


class Changes(Struct, frozen=True, omit_defaults=True):
    """Changes of single logits before the draw; kernels/sampling/change.py says how they are made.

    Token ids, counts and bits are int32 words in the machine's own byte order: a penalty on a prompt of 8,000 tokens
    goes out with every step, and so costs neither end a loop. Tokens that `allowed` does not reach may not be drawn.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seen: bytes = b""  # [M] distinct token ids, of the answer and, for `repetition`, of the prompt
    counts: bytes = b""  # [M] how often each was generated; 0 if it is in the prompt alone
    bias: dict[int, float] = {}  # token id -> what is added to its logit
    allowed: bytes = b""  # [W] words: token t may be drawn if bit t % 32 of word t // 32 is set; b"": all may


MAX_LOGPROBS = 20
"""Likeliest tokens told of each place: OpenAI's. They are found on the device, and travel with each token."""


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How the next token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    `logprobs` asks for the token's log-probability and those of so many likeliest ones, at most MAX_LOGPROBS.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    changes: Changes | None = None
    logprobs: int | None = None


class SequenceStep(Struct, frozen=True):
    """One sequence's part of a step.

    `pages` are the KV pages that hold positions 0 .. start + len(tokens) - 1, in order; the worker keeps no page
    table of its own. `sample` is None for a chunk that does not reach the prompt's end.

    Of a model with recurrent state, `state` is the state slot that this sequence owns. The step goes on from what is in
    it, or from the content of slot `restore`, which is copied into it first; at `start` 0 from zeros. Once the first
    `position` tokens of the sequence are in, start < position <= start + len(tokens), the state is copied into `slot`
    for each (position, slot) of `snapshots`. Of a model without, these are -1, -1 and empty.
    """

    sequence: int
    tokens: list[int]  # [n] new token ids
    start: int  # position of tokens[0]
    pages: list[int]
    sample: Sampling | None = None
    state: int = -1
    restore: int = -1
    snapshots: list[tuple[int, int]] = []  # (position, slot)


class RunStep(Struct, frozen=True, tag=True):
    """Run one step: T is the sum of all sequences' new tokens.

    Only from the connection whose Load came last: two schedulers would give out the same KV pages. Another one gets
    Failed("taken_over").
    """

    mode: Mode
    sequences: Annotated[list[SequenceStep], Meta(min_length=1)]


class Release(Struct, frozen=True, tag=True):
    """These sequences have ended. Nothing is kept of them here: pages and state slots are the scheduler's."""

    sequences: list[int]


class Stats(Struct, frozen=True, tag=True):
    """Ask for the counters."""


class LayerStats(Struct, frozen=True, tag=True):
    """Ask for the counters of each layer; answered between two steps."""


class Residency(Struct, frozen=True, tag=True):
    """Ask which experts are in slots; answered between two steps."""


class Flush(Struct, frozen=True, tag=True):
    """Forget which experts are in slots, between two steps: the next ones find none. Only as RunStep says."""


class VerifySlots(Struct, frozen=True, tag=True):
    """Compare every expert in a cache slot with its bank's checksum, between two steps.

    Failed("not_verifying") if the Load did not ask for `verify_copies`.
    """


class Shutdown(Struct, frozen=True, tag=True):
    """End the process after this reply."""


Request = Load | RunStep | Release | Stats | LayerStats | Residency | Flush | VerifySlots | Shutdown

# Replies ------------------------------------------------------------------------------------------------------------


class LoadProgress(Struct, frozen=True, tag=True):
    """Not final: bytes of weights read so far in this phase, of this worker's own or of what all workers share."""

    phase: str
    done_nbytes: int
    total_nbytes: int
    shared: bool = False


class Loaded(Struct, frozen=True, tag=True):
    """Facts the scheduler needs, as really allocated."""

    device: str
    dtype: str
    vocab_size: int
    max_position: int
    moe_layers: int  # L, 0 for a dense model
    experts: int  # E
    experts_per_token: int  # K
    record_nbytes: int
    slots: int  # S
    stream_slots: int
    kv_tokens: int
    page_tokens: int
    kv_nbytes: int
    bank_nbytes: int
    pool_nbytes: int
    dense_nbytes: int
    copy_engine: str  # "process" or "thread"
    load_s: float
    state_slots: int = 0  # recurrent states that can be kept; 0: the model has none
    state_nbytes: int = 0  # of all of them
    pinned_nbytes: int = 0  # of the banks: what the device copies by itself
    deterministic: bool = False  # what it computes of a sequence depends on nothing else


class ExpertStats(Struct, frozen=True):
    """Expert traffic of one mode. hits + misses = lookups; copied_nbytes = misses x record_nbytes.

    `copy_wait_s` are the seconds in which the copy engine had at least one query of these steps under way: from its
    reading the query's record until it saw that all of its copies had landed, or one had failed. So it is measured
    alike on every device, and is the most that computing can have waited for copies, but for what records and flags
    take on their way; what was computed meanwhile, in a streamed step much, is in it too. On a GPU the copy engine may
    see the end of a step's last copies when the step is over for the worker: then they count with its next one.
    """

    steps: int = 0
    lookups: int = 0
    hits: int = 0
    misses: int = 0
    copied_nbytes: int = 0
    copy_wait_s: float = 0.0


class Logprobs(Struct, frozen=True):
    """Natural logarithms of probabilities by the model's own logits: before bias, penalties and temperature."""

    drawn: float  # of the token that was drawn
    ids: list[int]  # [N] the likeliest tokens, likeliest first, of equal ones the lowest id
    top: list[float]  # [N] theirs


class StepDone(Struct, frozen=True, tag=True, omit_defaults=True):
    """`tokens[i]` is the token sampled for sequences[i], -1 where `sample` was None.

    It is -1 too where the logits were not finite, or no token was allowed, and NOT_FINITE where the hidden state of any
    of the sequence's new tokens was not, whether `sample` was None or not: that sequence cannot go on, and its KV and
    state are not to be read again. The others can.
    """

    tokens: list[int]
    stats: ExpertStats  # of this step alone
    logprobs: list[Logprobs | None] | None = None  # [B] of those that asked and have a token; None if nobody asked
    resident: int = 0  # slots that hold an expert now


class StatsReply(Struct, frozen=True, tag=True):
    """Counters since the start, per mode, and what is resident now."""

    decode: ExpertStats
    demand: ExpertStats
    streamed: ExpertStats
    slots: int
    resident: int
    dropped_frames: int
    damaged_steps: int = 0  # that ended with "copy_damaged": see Load.verify_copies


class LayerTraffic(Struct, frozen=True):
    """Experts of each layer found in their slots and copied, in one mode; hits[l] + misses[l] = lookups of layer l."""

    hits: list[int] = []  # [L]
    misses: list[int] = []  # [L]


class OracleFigures(Struct, frozen=True):
    """Expert lookups of those decode steps that were logged: the first ones after each LayerStats."""

    steps: int = 0
    lookups: int = 0
    hits: int = 0  # by the policy
    oracle_hits: int = 0  # by the best that as many slots could do: worker/oracle.py


class LayerStatsReply(Struct, frozen=True, tag=True):
    """Counters of each layer since the start, failed steps included; L is 0 for a dense model."""

    decode: LayerTraffic
    demand: LayerTraffic
    streamed: LayerTraffic
    routing: list[list[int]]  # [L, E] decode steps that routed to each expert
    oracle: OracleFigures = OracleFigures()  # since the start, if the Load asked for it


class ResidencyReply(Struct, frozen=True, tag=True):
    """Which experts are in cache slots: bit e % 8, the lowest being 0, of byte e // 8 of each layer's row."""

    layers: int = 0  # L, 0 for a dense model
    experts: int = 0  # E
    resident: bytes = b""  # [L, ceil(E / 8)]


class SlotsVerified(Struct, frozen=True, tag=True):
    """`checked` experts are in cache slots; those of `damaged`, (layer, expert), are not what was loaded."""

    checked: int
    damaged: list[tuple[int, int]]


class Done(Struct, frozen=True, tag=True):
    """Release, Flush or Shutdown went through."""


class Failed(Struct, frozen=True, tag=True):
    """The request was not carried out."""

    code: str
    detail: str


Reply = LoadProgress | Loaded | StepDone | StatsReply | LayerStatsReply | ResidencyReply | SlotsVerified | Done | Failed
FINAL = (Loaded, StepDone, StatsReply, LayerStatsReply, ResidencyReply, SlotsVerified, Done, Failed)
