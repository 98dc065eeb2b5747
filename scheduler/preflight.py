"""What a start can be refused for before anything is started: the settings, the model, the machine."""

import ipaddress
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq

from copyengine import available
from copyengine.budget import Budget, Wanted, check_cache_policy
from copyengine.checkpoint.builtin import NAME, cache_directory, ensure_builtin
from copyengine.checkpoint.directory import unknown_overrides
from copyengine.checkpoint.model import Model, open_model
from copyengine.device.host import reclaim_stale
from copyengine.placement import Placement, memory_plan, place
from copyengine.planning import Plan
from copyengine.wire.errors import ConfigError
from copyengine.wire.loop import resolve
from scheduler.config import LaunchConfig, ServingConfig
from scheduler.http.config import DEFAULT_BODY_NBYTES, DEFAULT_HTTP_HOST
from scheduler.http.listening import open_listener, read_key
from scheduler.text_trial import TextTrial
from worker.protocol import STATE_CUT_TOKENS

LEAST_MODEL_LEN = 2
"""A prompt token and an answer token."""


def listen_endpoint(config: ServingConfig) -> str:
    """Where to listen. ConfigError unless the host is an IPv4 loopback address."""
    host = "127.0.0.1" if config.host == "localhost" else config.host
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"--host {config.host}: must be a loopback address such as 127.0.0.1; there is no access control, "
            "so reach it from elsewhere through an SSH tunnel"
        )
    return f"tcp://{host}:{config.port}"


def check_port(config: ServingConfig) -> None:
    """ConfigError if the scheduler could not listen now. A socket of the kind it will use says so."""
    endpoint = listen_endpoint(config)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        try:
            probe.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {endpoint}: {error.strerror}; choose another --port") from None


def check_front(config: LaunchConfig) -> None:
    """ConfigError if there could be no HTTP front as it is asked for, or is none and it is said how it should be."""
    if config.http_port is None:
        defaults = {"http_host": DEFAULT_HTTP_HOST, "api_key": "", "http_max_body_bytes": DEFAULT_BODY_NBYTES}
        for name, default in defaults.items():
            if getattr(config, name) != default:
                raise ConfigError(f"--{name.replace('_', '-')}: only with --http-port, without which there is no HTTP")
        return
    if config.prompt is not None:
        raise ConfigError("--prompt: is answered without HTTP; leave --http-port out, or --prompt to serve")
    read_key(config.api_key)
    open_listener(config.http_host, config.http_port).close()


def check_stats_file(config: ServingConfig) -> None:
    """ConfigError if --collect-stats names a file that cannot be written; makes nothing."""
    if not config.collect_stats:
        return
    path = Path(config.collect_stats)
    try:
        path = path.resolve()
        if path.is_dir():
            raise ConfigError(f"--collect-stats {path}: is a directory; name a file in it")
        if path.exists() and not path.is_file():
            raise ConfigError(f"--collect-stats {path}: is a device or the like, which would be replaced; name a file")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".part"):
            pass
    except OSError as error:
        raise ConfigError(f"--collect-stats {path}: cannot be written: {error.strerror}") from None


def max_model_len(config: ServingConfig, positions: int, kv_tokens: int) -> int:
    """Prompt and answer tokens of one request. ConfigError if more are asked for than the model or the KV holds."""
    asked = config.max_model_len
    if min(asked or positions, positions, kv_tokens) < LEAST_MODEL_LEN:
        raise ConfigError(
            f"--max-model-len {asked or min(positions, kv_tokens)}: a prompt token and an answer token need "
            f"{LEAST_MODEL_LEN}; raise --max-model-len and --kv-tokens"
        )
    if asked > positions:
        raise ConfigError(f"--max-model-len {asked}: the model has {positions} positions; use no more, or 0 for all")
    if asked > kv_tokens:
        raise ConfigError(
            f"--max-model-len {asked}: the KV pages hold {kv_tokens} tokens; raise --kv-tokens or lower --max-model-len"
        )
    return asked or min(positions, kv_tokens)


def cut_tokens(config: ServingConfig, recurrent: bool) -> int | None:
    """Multiples at which alone prompts are cut, if there are any; see CoreLimits. ConfigError if no chunk has one.

    A model that is not `recurrent` has no state that would depend on the cuts.
    """
    if not (config.deterministic and recurrent):
        return None
    if config.chunked_prefill_size < STATE_CUT_TOKENS:
        raise ConfigError(
            f"--chunked-prefill-size {config.chunked_prefill_size}: a model with recurrent state is prefilled by "
            f"{STATE_CUT_TOKENS} tokens with --deterministic; use {STATE_CUT_TOKENS} or more"
        )
    return STATE_CUT_TOKENS


class Inspected(NamedTuple):
    """What was found of model and machine, whatever fits."""

    model: Model
    placement: Placement
    plan: Plan


class Preflight(NamedTuple):
    """What was found to be right before anything is started."""

    model: Model
    placement: Placement
    budget: Budget


def inspect(config: LaunchConfig, say: Callable[[str], object]) -> Inspected:
    """The model and where it runs. ConfigError if it or the settings are no good. `say` hears what takes long."""
    check_stats_file(config)
    check_front(config)
    if config.prompt == "":
        raise ConfigError("--prompt: is empty; leave it out to serve")
    if config.check and config.prompt is not None:
        raise ConfigError("--check: starts nothing that could answer a --prompt; leave one of them out")
    placement = place(config.device, config.copy_engine, config.workers)
    resolve(config.event_loop)
    reclaim_stale()
    directory = Path(config.model) if config.model else _builtin_model(say)
    with TextTrial(directory if config.model else None, config.hf_overrides) as trial:
        model = open_model(directory, config.hf_overrides, config.load_format, config.expert_activations)
        trial.passed()
    check_cache_policy(model.spec, config.cache_policy)
    for key in unknown_overrides(directory, config.hf_overrides):
        say(f"note: --hf-overrides: config.json has no key {key}; it counts only if the model has such a setting")
    dtype = model.spec.checkpoint_dtype if config.dtype == "auto" else config.dtype
    return Inspected(model, placement, memory_plan(model.spec, dtype, placement, available.host_nbytes()))


def preflight(config: LaunchConfig, say: Callable[[str], object]) -> Preflight:
    """The model and where it runs, checked, and what each worker will allocate.

    ConfigError if the model or the settings are no good, or the machine has too little of something. `say` hears also
    what was changed from what was asked.
    """
    check_port(config)  # first: with an engine on it already there may be too little memory as well
    model, placement, plan = inspect(config, say)
    budget = plan.settled(wanted(config, config.workers))
    check_serving(config, model, budget)
    for note in budget.notes:
        say(f"note: {note}")
    return Preflight(model, placement, budget)


def check_serving(config: ServingConfig, model: Model, budget: Budget) -> None:
    """ConfigError if a scheduler with these sizes would refuse to serve."""
    max_model_len(config, model.spec.max_position, budget.kv_tokens)
    cut_tokens(config, recurrent=budget.state_slots > 0)


def wanted(config: ServingConfig, workers: int = 1) -> Wanted:
    """The sizes that the settings ask for, of each of `workers`."""
    return Wanted(
        slots=0 if config.slots == "auto" else config.slots,
        kv_tokens=0 if config.kv_tokens == "auto" else config.kv_tokens,
        demand_prefill=config.demand_tokens > 0,
        max_step_tokens=config.chunked_prefill_size,
        max_running=config.max_running_requests,
        vram_reserve_nbytes=0 if config.vram_reserve_bytes == "auto" else config.vram_reserve_bytes,
        embedding_placement=config.token_embedding_placement,
        kv_placement=config.kv_placement,
        workers=workers,
        state_slots=0 if config.state_slots == "auto" else config.state_slots,
        prefix_cache=not config.disable_prefix_cache,
    )


def _builtin_model(say: Callable[[str], object]) -> Path:
    """The built-in model's directory; says so if it has to be made."""
    if not os.path.exists(cache_directory() / NAME):
        say(f"making the built-in model in {cache_directory()} (once)")
    return ensure_builtin()
