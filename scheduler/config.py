"""Settings of the scheduler process."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from copyengine.budget import MemoryPlacement
from copyengine.placement import CopyEngineChoice, DeviceChoice
from copyengine.protocol import ExpertActivations, LoadFormat
from copyengine.wire.errors import ConfigError
from copyengine.wire.logs import LogLevel
from copyengine.wire.loop import EventLoop
from copyengine.wire.restarts import DRAIN_TIMEOUT_S
from scheduler.http.config import (
    DEFAULT_BODY_NBYTES,
    DEFAULT_HTTP_HOST,
    ApiKey,
    HttpHost,
    HttpPort,
    MaxBodyBytes,
)

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
AutoOr = Literal["auto"]
CachePolicy = Literal["lru", "lrfu"]

MOST = 2**31 - 1
"""Counts and sizes above this are slips of the keyboard, and would not fit in a message either."""

MOST_BYTES = 2**48 - 1
"""Of memory, likewise."""

DEFAULT_PORT = 5757

DEFAULT_READY_TIMEOUT_S = 120.0
"""Without progress: pinning of a large bank, or kernels that are compiled for the first time, say nothing for up to a
minute. Fewer would refuse good starts, more only say later that a disk or a driver hangs."""

LEAST_WATCHDOG_S = 1.0
"""Of --watchdog-s, but for 0: a process that is well answers this late at times, as DEFAULT_WATCHDOG_S says. Less kills
what works."""

DEFAULT_WATCHDOG_S = 20.0
"""Longer than an event loop is held up by anything that is well: 0.9 s by the largest tokenizer's grammars, 0.6 s by
the worst HTTP body, a few seconds by a machine that swaps, ten by somebody who stops a process to look at it. Shorter
than the 30 s after which clients (SILENCE_S) and steps (COPY_DEADLINE_S) give up by themselves and name no cause."""


class ServingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What launch.py and a scheduler started alone have in common."""

    served_model_name: Annotated[str, Meta(description="name clients see; default the directory's name")] = ""
    hf_overrides: Annotated[
        str, Meta(description="JSON object merged over config.json, key by key also inside its objects")
    ] = "{}"
    dtype: Annotated[Dtype, Meta(description="element type of weights and activations; auto is the checkpoint's")] = (
        "auto"
    )
    load_format: Annotated[
        LoadFormat, Meta(description="auto reads the checkpoint's weights; dummy makes them up from config.json alone")
    ] = "auto"
    expert_activations: Annotated[
        ExpertActivations,
        Meta(
            description="w4a4 rounds activations to FP4 before NVFP4 experts, under the checkpoint's input scales; "
            "plain leaves them as they are"
        ),
    ] = "plain"
    demand_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST,
            description="prefill chunks up to this many tokens load only the experts they route to; 0: always stream",
            extra_json_schema={"aliases": ["--moe-prefill-demand-tokens"]},
        ),
    ] = 512
    slots: Annotated[
        AutoOr | Annotated[int, Meta(ge=1, le=MOST)], Meta(description="experts the device pool holds")
    ] = "auto"
    cache_policy: Annotated[
        CachePolicy,
        Meta(
            description="which expert makes room for another: lru the least recently used; lrfu the one of the lowest "
            "score, which each use in decode adds to and which halves every 8 steps"
        ),
    ] = "lru"
    max_running_requests: Annotated[
        int, Meta(ge=1, le=MOST, description="requests that prefill or decode at a time")
    ] = 16
    max_queued_requests: Annotated[
        int, Meta(ge=0, le=MOST, description="requests that may wait; one more is refused")
    ] = 256
    chunked_prefill_size: Annotated[int, Meta(ge=1, le=MOST, description="tokens of the longest prefill chunk")] = 4096
    max_model_len: Annotated[
        int,
        Meta(ge=0, le=MOST, description="prompt and answer tokens of one request; 0: what the model and the KV hold"),
    ] = 0
    kv_tokens: Annotated[AutoOr | Annotated[int, Meta(ge=1, le=MOST)], Meta(description="tokens the KV pages hold")] = (
        "auto"
    )
    vram_reserve_bytes: Annotated[
        AutoOr | Annotated[int, Meta(ge=1, le=MOST_BYTES)],
        Meta(description="bytes of each GPU to leave free for contexts, libraries, kernels and graphs; auto is 2 GiB"),
    ] = "auto"
    token_embedding_placement: Annotated[
        MemoryPlacement,
        Meta(
            description="where the token embedding lies; host: in pinned memory that the GPU reads a step's rows from"
        ),
    ] = "device"
    kv_placement: Annotated[
        MemoryPlacement,
        Meta(description="where the KV pages lie; host: in pinned memory that the GPU reads and writes over its link"),
    ] = "device"
    state_slots: Annotated[
        AutoOr | Annotated[int, Meta(ge=1, le=MOST)],
        Meta(description="recurrent states kept, of running requests and snapshots to reuse, if the model has any"),
    ] = "auto"
    disable_prefix_cache: Annotated[
        bool,
        Meta(
            description="compute every prompt in full, also where the KV of its beginning is there",
            extra_json_schema={"aliases": ["--disable-radix-cache"]},
        ),
    ] = False
    deterministic: Annotated[
        bool,
        Meta(
            description="the same answer to the same request, bit for bit, whatever else is served, cached or in slots "
            "and however its prompt is cut; slower"
        ),
    ] = False
    verify_copies: Annotated[
        bool,
        Meta(
            description="compare every expert with a checksum of what was loaded before it is computed with; what "
            "differs ends the requests of its step"
        ),
    ] = False
    host: Annotated[str, Meta(description="loopback address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 picks a free one")] = DEFAULT_PORT
    collect_stats: Annotated[
        str,
        Meta(description="JSON file for hit rates by layer and routing frequencies, written every 30 s and at the end"),
    ] = ""
    event_loop: Annotated[EventLoop, Meta(description="asyncio event loop")] = "auto"
    log_level: Annotated[LogLevel, Meta(description="least severe log lines to show")] = "info"
    ready_timeout_s: Annotated[
        float, Meta(gt=0, le=86400, description="seconds without progress after which a start is given up")
    ] = DEFAULT_READY_TIMEOUT_S


class SchedulerConfig(ServingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Takes requests from loopback clients and turns them into prefill chunks and decode steps."""

    model: Annotated[str, Meta(description="checkpoint directory")]
    workers: Annotated[str, Meta(description="endpoints of the workers, comma-separated")]
    parent_pipe: Annotated[bool, Meta(description="stop when standard input ends (set by launch.py)")] = False


class LaunchConfig(ServingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve a Mixture-of-Experts model whose experts do not fit in device memory."""

    model: Annotated[str, Meta(description="checkpoint directory; the built-in random model if not given")] = ""
    workers: Annotated[int, Meta(ge=1, le=64, description="worker processes, one per device")] = 1
    device: Annotated[DeviceChoice, Meta(description="where the model runs; auto takes GPUs that can be used")] = "auto"
    copy_engine: Annotated[
        CopyEngineChoice,
        Meta(description="the copy engine as a process of its own for all workers, or as a thread of the one worker"),
    ] = "auto"
    check: Annotated[
        bool, Meta(description="start nothing: print what memory is needed and present, and what speed to expect")
    ] = False
    http_port: Annotated[
        HttpPort | None, Meta(description="serve OpenAI-compatible HTTP on this port; 0 picks a free one")
    ] = None
    http_host: HttpHost = DEFAULT_HTTP_HOST
    api_key: ApiKey = ""
    http_max_body_bytes: MaxBodyBytes = DEFAULT_BODY_NBYTES
    watchdog_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="seconds that a serving process may leave the question whether it is alive unanswered; then it "
            "is killed and started anew; 1 at least, or 0: for ever, as under a debugger",
        ),
    ] = DEFAULT_WATCHDOG_S
    drain_timeout_s: Annotated[
        float,
        Meta(ge=0, le=86400, description="seconds that running requests may take to finish after SIGTERM"),
    ] = DRAIN_TIMEOUT_S
    prompt: Annotated[str | None, Meta(description="answer this prompt, print the figures and exit")] = None

    def __post_init__(self) -> None:
        """ConfigError about what one field's bounds cannot say."""
        if 0 < self.watchdog_s < LEAST_WATCHDOG_S:
            raise ConfigError(
                f"--watchdog-s {self.watchdog_s:g}: processes that are well would be killed; "
                f"{LEAST_WATCHDOG_S:g} at least, or 0 for ever"
            )
