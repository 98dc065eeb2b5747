"""Starts the whole engine: copy engine, workers, scheduler; starts anew what dies; stops them.

`python launch.py --workers 1 --demand-tokens 512` serves until Ctrl-C; `--prompt TEXT` answers once and exits.
Exit codes: 0 as asked, 1 processes died and were given up, 2 the start was refused.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `main`: Ctrl-C during the imports shows no traceback

import contextlib
import io
import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import psutil
from msgspec import Meta
from msgspec.structs import replace

from copyengine.budget import Budget, Wanted
from copyengine.checkpoint.builtin import NAME, cache_directory, ensure_builtin
from copyengine.checkpoint.model import Model, open_model
from copyengine.config import CopyEngineConfig
from copyengine.device.host import reclaim_stale
from copyengine.placement import CopyEngineChoice, DeviceChoice, Placement, memory_plan, place
from copyengine.wire import cli
from copyengine.wire.child import Told
from copyengine.wire.errors import ConfigError, SlotstreamError
from copyengine.wire.lifecycle import EXIT_CONFIG, STOP_GRACE_S, Progress, Ready
from copyengine.wire.logs import ERASE_LINE, configure_logging
from copyengine.wire.loop import resolve
from copyengine.wire.restarts import Patience, Role
from copyengine.wire.supervisor import Command, Supervisor
from scheduler import client_cli
from scheduler.config import DEFAULT_PORT, SchedulerConfig, ServingConfig
from scheduler.live_status import LiveStatus
from scheduler.preflight import check_port, check_stats_file, max_model_len
from scheduler.ready_block import ready_block
from worker.config import WorkerConfig

LISTEN_TIMEOUT_S = 30.0
"""Seconds a process may take to bind its socket: Python's start and the imports of zmq, 0.3 s on an idle machine."""

LAST_WORD_S = 20.0
"""Seconds beyond --ready-timeout-s that the processes have to say themselves what did not start."""

log = logging.getLogger("launch")


class LaunchConfig(ServingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve a Mixture-of-Experts model whose experts do not fit in device memory."""

    model: Annotated[str, Meta(description="checkpoint directory; the built-in random model if not given")] = ""
    workers: Annotated[int, Meta(ge=1, le=64, description="worker processes, one per device")] = 1
    device: Annotated[DeviceChoice, Meta(description="where the model runs; auto takes GPUs that can be used")] = "auto"
    copy_engine: Annotated[
        CopyEngineChoice,
        Meta(description="the copy engine as a process of its own for all workers, or as a thread of the one worker"),
    ] = "auto"
    prompt: Annotated[str | None, Meta(description="answer this prompt, print the figures and exit")] = None


class Preflight(NamedTuple):
    """What was found to be right before anything is started."""

    model: Model
    placement: Placement
    budget: Budget


class ProgressLine:
    """Shows loading on standard error: one live line on a terminal, else a line at each phase's start and end."""

    def __init__(self) -> None:
        self._phase = ""
        self._live = sys.stderr.isatty()

    def show(self, seen: Progress) -> None:
        """So much is through."""
        finished = seen.done_nbytes >= seen.total_nbytes
        text = f"{seen.phase}: {seen.done_nbytes / 1e6:,.0f} of {seen.total_nbytes / 1e6:,.0f} MB"
        with contextlib.suppress(OSError):  # the terminal is gone, and we serve on without it
            if self._live:
                print(f"{ERASE_LINE}{text}", end="\n" if finished else "", file=sys.stderr, flush=True)
            elif seen.phase != self._phase or finished:
                print(text, file=sys.stderr, flush=True)
        self._phase = seen.phase


class Engine:
    """The processes of one run: which there are, and what each is started with."""

    def __init__(self, config: LaunchConfig, found: Preflight, progress: ProgressLine) -> None:
        self.scheduler_endpoint = ""
        self._config = config
        self._found = found
        self._run_id = f"ss{secrets.token_hex(4)}"
        self._supervisor = Supervisor(
            roles(config.workers, found.placement),
            Patience(LISTEN_TIMEOUT_S, config.ready_timeout_s + LAST_WORD_S, STOP_GRACE_S, "--ready-timeout-s"),
            self.command,
            say=log.warning,
            on_progress=progress.show,
            on_end=reclaim_stale,
        )

    def start(self) -> Ready:
        """Start everything; the scheduler's Ready. Raises as Supervisor.start does."""
        ready = self._supervisor.start()
        self.scheduler_endpoint = self._supervisor.endpoint("scheduler")
        return ready

    def serve(self) -> int:
        """Serve until a signal comes; the exit code. PeerDied if too many processes die.

        Meanwhile a terminal shows what is going on.
        """
        with LiveStatus(self.scheduler_endpoint, sys.stderr, self._config.event_loop):
            return self._supervisor.serve()

    def told(self, name: str) -> None:
        """Signal `name` came."""
        self._supervisor.notices.put(Told(name))

    def stop(self) -> None:
        """End all processes and remove what a killed one may have left in shared memory. A signal makes it short."""
        on_signals(lambda _: self._supervisor.kill())
        self._supervisor.stop()
        reclaim_stale()

    def command(self, name: str, endpoints: Mapping[str, str]) -> Command:
        """What starts process `name`, given where those listen that it works with."""
        config, placement = self._config, self._found.placement
        common: dict[str, Any] = {"event_loop": config.event_loop, "log_level": config.log_level, "parent_pipe": True}
        on_device = common | {"run_id": self._run_id, "device": placement.device}
        ordinals = [gpu.ordinal for gpu in placement.gpus] or [0] * config.workers
        if name == "scheduler":
            return Command("scheduler", cli.to_argv(self._scheduler_config(endpoints)))
        if name == "copyengine":
            return Command("copyengine", cli.to_argv(CopyEngineConfig(ordinal=ordinals[0], **on_device)))
        worker = WorkerConfig(
            name=name,
            ordinal=ordinals[worker_names(config.workers).index(name)],
            copy_engine=endpoints.get("copyengine", ""),
            threads=max(1, (psutil.cpu_count(logical=False) or 1) - 1) // config.workers or 1,  # a core for the copies
            **on_device,
        )
        return Command("worker", cli.to_argv(worker))

    def _scheduler_config(self, endpoints: Mapping[str, str]) -> SchedulerConfig:
        """With the sizes that were planned. Started anew, it listens where its clients know it."""
        config, budget, directory = self._config, self._found.budget, self._found.model.directory
        serving = {name: getattr(config, name) for name in ServingConfig.__struct_fields__}
        serving["served_model_name"] = config.served_model_name or directory.name
        serving["kv_tokens"] = budget.kv_tokens
        if budget.slots:
            serving["slots"] = budget.slots
        if self.scheduler_endpoint:
            serving["port"] = int(self.scheduler_endpoint.rsplit(":", 1)[1])
        workers = ",".join(endpoints[name] for name in worker_names(config.workers))
        return SchedulerConfig(model=str(directory), workers=workers, parent_pipe=True, **serving)


def worker_names(workers: int) -> list[str]:
    """What the workers are called, in the order in which the scheduler is given their endpoints."""
    return [f"worker{i}" for i in range(workers)]


def roles(workers: int, placement: Placement) -> list[Role]:
    """The processes in the order of their start: rest_for_one, but that the scheduler outlives what it works with."""
    needs = ("copyengine",) if placement.copy_engine == "process" else ()
    names = worker_names(workers)
    return [*map(Role, needs), *(Role(name, needs=needs) for name in names), Role("scheduler", uses=tuple(names))]


def preflight(config: LaunchConfig) -> Preflight:
    """The model and where it runs, checked, and what each worker will allocate.

    ConfigError if the model or the settings are no good, or the machine has too little of something.
    """
    check_stats_file(config)
    if config.prompt == "":
        raise ConfigError("--prompt: is empty; leave it out to serve")
    placement = place(config.device, config.copy_engine, config.workers)
    resolve(config.event_loop)
    reclaim_stale()
    directory = Path(config.model) if config.model else builtin_model()
    model = open_model(directory, config.hf_overrides, config.load_format)
    dtype = model.spec.checkpoint_dtype if config.dtype == "auto" else config.dtype
    plan = memory_plan(model.spec, dtype, placement, psutil.virtual_memory().available)
    budget = plan.settled(wanted(config))
    max_model_len(config, model.spec.max_position, budget.kv_tokens)
    check_port(config)
    for note in budget.notes:
        print(f"note: {note}", file=sys.stderr)
    return Preflight(model, placement, budget)


def wanted(config: LaunchConfig) -> Wanted:
    """The sizes that the settings ask for."""
    return Wanted(
        slots=0 if config.slots == "auto" else config.slots,
        kv_tokens=0 if config.kv_tokens == "auto" else config.kv_tokens,
        demand_prefill=config.demand_tokens > 0,
        max_step_tokens=config.chunked_prefill_size,
        max_running=config.max_running_requests,
        vram_reserve_nbytes=0 if config.vram_reserve_bytes == "auto" else config.vram_reserve_bytes,
        embedding_placement=config.token_embedding_placement,
        kv_placement=config.kv_placement,
        workers=config.workers,
    )


def builtin_model() -> Path:
    """The built-in model's directory; says so if it has to be made."""
    if not os.path.exists(cache_directory() / NAME):
        print(f"making the built-in model in {cache_directory()} (once)", file=sys.stderr, flush=True)
    return ensure_builtin()


def on_signals(told: Callable[[str], object]) -> None:
    """Call `told` with the name of each signal that asks us to end, in place of what was called so far."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: told(signal.Signals(number).name))


def run(config: LaunchConfig) -> int:
    """Start, serve or answer, stop; the exit code. ConfigError if the start is refused."""
    configure_logging(config.log_level, "launch")
    if config.prompt is not None and config.port == DEFAULT_PORT:
        config = replace(config, port=0)  # nobody else needs to find it: it may run beside another engine
    found = preflight(config)
    log.info("device %s, %s", found.placement.device, found.placement.reason)
    engine = Engine(config, found, ProgressLine())
    try:
        on_signals(engine.told)
        ready = engine.start()
        out = sys.stdout if config.prompt is None else sys.stderr  # standard output is the answer's
        print(ready_block(found.model, found.placement, ready, engine.scheduler_endpoint), file=out, flush=True)
        return engine.serve() if config.prompt is None else answer(config, engine.scheduler_endpoint)
    finally:
        engine.stop()


def answer(config: LaunchConfig, endpoint: str) -> int:
    """Answer --prompt as the client command does; its exit code, also when a signal ends it."""
    on_signals(lambda _: signal.raise_signal(signal.SIGINT))  # the event loop turns that one into a cancellation
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert config.prompt is not None
    return client_cli.main(["--endpoint", endpoint, "--event-loop", config.event_loop, "--", config.prompt])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an output that is not UTF-8 gets what it can of a model's name
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(cli.parse(LaunchConfig, argv, "launch.py"))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except SlotstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # whoever read our output is gone; keep the interpreter from flushing into it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
