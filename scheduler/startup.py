"""From settings to a serving scheduler: connect the workers, have them load, derive what one request may take."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import zmq.asyncio

from copyengine.checkpoint.directory import read_config
from copyengine.wire.errors import ConfigError, PeerTimeout
from copyengine.wire.lifecycle import Progress
from copyengine.wire.logs import Log
from copyengine.wire.loop import resolve
from scheduler.config import SchedulerConfig
from scheduler.core import Core, CoreLimits
from scheduler.grammar import Grammars
from scheduler.lane import Lane
from scheduler.preflight import cut_tokens, max_model_len
from scheduler.ticket import Service
from scheduler.tokenize import TextCodec, load_text_codec
from worker.client import WorkerClient
from worker.protocol import Load, Loaded, LoadProgress

LOAD_MARGIN_S = 10.0
"""Seconds that a worker's silence may last longer than what it waits for itself, so that it names the cause."""

log = Log(__name__)


def model_name(config: SchedulerConfig) -> str:
    """The name clients see."""
    return config.served_model_name or Path(os.path.abspath(config.model)).name


def load_request(config: SchedulerConfig) -> Load:
    """What every worker is asked to load."""
    return Load(
        model=os.path.abspath(config.model),
        dtype=config.dtype,
        hf_overrides=config.hf_overrides,
        slots=0 if config.slots == "auto" else config.slots,
        kv_tokens=0 if config.kv_tokens == "auto" else config.kv_tokens,
        max_step_tokens=max(config.chunked_prefill_size, config.max_running_requests),
        max_running=config.max_running_requests,
        vram_reserve_nbytes=0 if config.vram_reserve_bytes == "auto" else config.vram_reserve_bytes,
        embedding_placement=config.token_embedding_placement,
        kv_placement=config.kv_placement,
        state_slots=0 if config.state_slots == "auto" else config.state_slots,
        load_format=config.load_format,
        expert_activations=config.expert_activations,
        cache_policy=config.cache_policy,
        log_routing=bool(config.collect_stats),
        verify_copies=config.verify_copies,
        demand_prefill=config.demand_tokens > 0,
        deadline_s=config.ready_timeout_s,
    )


async def load_workers(
    context: zmq.asyncio.Context, config: SchedulerConfig, on_progress: Callable[[Progress], None]
) -> tuple[list[WorkerClient], list[Loaded]]:
    """Connected workers that have all loaded the model. Raises what the first worker that cannot says.

    ConfigError for an endpoint that is none; PeerTimeout, naming the setting, if a worker or its copy engine is silent.
    """
    endpoints = [endpoint.strip() for endpoint in config.workers.split(",") if endpoint.strip()]
    if not endpoints:
        raise ConfigError("--workers: needs at least one endpoint such as tcp://127.0.0.1:5801")

    workers: list[WorkerClient] = []
    try:
        workers.extend(WorkerClient(context, endpoint) for endpoint in endpoints)
        names = [f"worker{i}" for i in range(len(workers))] if len(workers) > 1 else [""]
        loading = (load_worker(*each, config, on_progress) for each in zip(workers, names, strict=True))
        return workers, await asyncio.gather(*loading)
    except BaseException:
        await close_all(workers)
        raise


async def load_worker(
    worker: WorkerClient, name: str, config: SchedulerConfig, on_progress: Callable[[Progress], None]
) -> Loaded:
    """What `worker` says once it has loaded the model. Raises what it says if it cannot, as `load_workers` does.

    `name` is said with its progress, but of what it shares with others.
    """

    def relay(progress: LoadProgress) -> None:
        whose = "" if progress.shared else name
        on_progress(Progress(progress.phase, progress.done_nbytes, progress.total_nbytes, whose))

    try:
        facts = await worker.load(load_request(config), config.ready_timeout_s + LOAD_MARGIN_S, relay)
    except PeerTimeout as error:
        raise PeerTimeout(f"{error}; raise --ready-timeout-s if the machine is only slow") from None
    if facts.deterministic != config.deterministic:
        which = "this scheduler" if config.deterministic else "the worker"
        raise ConfigError(f"--deterministic: only {which} was started with it; start both with it, or neither")
    return facts


async def close_all(workers: list[WorkerClient]) -> None:
    """Close the connections; the workers go on."""
    for worker in workers:
        await worker.close()


def _demand_tokens(config: SchedulerConfig, loaded: Loaded) -> int:
    """The demand threshold in force: 0 for a dense model, which has no experts to fetch."""
    if loaded.moe_layers == 0 and config.demand_tokens > 0:
        log.info("demand_off", detail="a dense model has no experts: --demand-tokens is 0")
        return 0
    return config.demand_tokens


def build_service(config: SchedulerConfig, workers: list[WorkerClient], loaded: list[Loaded]) -> Service:
    """Everything the server needs. ConfigError if the model's text files or --max-model-len are no good."""
    threshold = _demand_tokens(config, loaded[0])  # all have the same model
    pairs = zip(workers, loaded, strict=True)
    lanes = [
        Lane(f"worker{i}", each, new_core(config, threshold, facts), facts) for i, (each, facts) in enumerate(pairs)
    ]
    positions = min(facts.max_position for facts in loaded)
    text = load_text_codec(Path(config.model), read_config(Path(config.model), config.hf_overrides))
    vocab_size = min(facts.vocab_size for facts in loaded)
    return Service(
        text=text,
        vocab_size=vocab_size,
        max_model_len=max_model_len(config, positions, min(facts.kv_tokens for facts in loaded)),
        max_queued=config.max_queued_requests,
        demand_tokens=threshold,
        lanes=lanes,
        grammars=_grammars(text, vocab_size),
    )


def _grammars(text: TextCodec, vocab_size: int) -> Grammars | None:
    """None if no answer can be held to a grammar."""
    try:
        return text.grammars(vocab_size)
    except ValueError as error:
        log.warning("grammars_refused", detail=f"llguidance cannot read the tokenizer: {error}")
        return None


def new_core(config: SchedulerConfig, demand_tokens: int, facts: Loaded) -> Core:
    """An empty core for a worker with these `facts`; `demand_tokens` is the threshold in force."""
    limits = CoreLimits(
        pages=facts.kv_tokens // facts.page_tokens,
        page_tokens=facts.page_tokens,
        max_running=config.max_running_requests,
        demand_tokens=demand_tokens,
        chunk_tokens=config.chunked_prefill_size,
        prefix_cache=not config.disable_prefix_cache,
        state_slots=facts.state_slots,
        state_nbytes=facts.state_nbytes,
        cut_tokens=cut_tokens(config, recurrent=facts.state_slots > 0),
    )
    return Core(limits)


def ready_facts(config: SchedulerConfig, service: Service, loaded: list[Loaded]) -> dict[str, str | int | float | bool]:
    """What the Ready event says: what launch.py prints. Sizes are per worker, as really allocated."""
    first = loaded[0]
    return {
        "model": model_name(config),
        "workers": len(loaded),
        "device": ", ".join(dict.fromkeys(facts.device for facts in loaded)),
        "dtype": first.dtype,
        "moe_layers": first.moe_layers,
        "experts": first.experts,
        "experts_per_token": first.experts_per_token,
        "slots": first.slots,
        "cache_policy": config.cache_policy,
        "stream_slots": first.stream_slots,
        "bank_nbytes": first.bank_nbytes,
        "pinned_nbytes": first.pinned_nbytes,
        "pool_nbytes": first.pool_nbytes,
        "kv_tokens": first.kv_tokens,
        "kv_nbytes": first.kv_nbytes,
        "kv_placement": config.kv_placement,
        "state_slots": first.state_slots,
        "state_nbytes": first.state_nbytes,
        "deterministic": config.deterministic,
        "verify_copies": config.verify_copies,
        "max_model_len": service.max_model_len,
        "demand_tokens": service.demand_tokens,
        "copy_engine": first.copy_engine,
        "event_loop": resolve(config.event_loop),
    }
