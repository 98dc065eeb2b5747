"""Starts the whole engine: copy engine, workers, scheduler; watches them; stops them.

`python launch.py --workers 1 --demand-tokens 512` serves until Ctrl-C; `--prompt TEXT` answers once and exits.
Exit codes: 0 as asked, 1 a process failed, 2 the start was refused.
"""

import io
import logging
import math
import os
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import psutil
from msgspec import Meta

from copyengine.budget import Budget, Wanted
from copyengine.checkpoint.builtin import NAME, cache_directory, ensure_builtin
from copyengine.checkpoint.model import Model, open_model
from copyengine.config import CopyEngineConfig
from copyengine.device.host import reclaim_stale
from copyengine.placement import CopyEngineChoice, DeviceChoice, Placement, place, plan_memory
from copyengine.wire import cli
from copyengine.wire.child import Child, Exited, Notice, Notices, Said, Told
from copyengine.wire.errors import ConfigError, PeerDied, PeerTimeout, SlotstreamError, from_code
from copyengine.wire.lifecycle import EXIT_CONFIG, Event, Listening, Progress, Ready, StartFailed
from copyengine.wire.logs import configure_logging
from copyengine.wire.loop import resolve
from scheduler import client_cli
from scheduler.client import DEFAULT_ENDPOINT
from scheduler.config import SchedulerConfig, ServingConfig
from worker.config import WorkerConfig

LISTEN_TIMEOUT_S = 30.0
"""Seconds a process may take to bind its socket: Python's start and the imports of zmq, 0.3 s on an idle machine."""

POLL_S = 0.25
"""Seconds after which a signal is seen at the latest."""

LAST_WORD_S = 20.0
"""Seconds beyond --ready-timeout-s that the processes have to say themselves what did not start."""

DRAIN_TIMEOUT_S = 60.0
"""Seconds running requests may take to finish after SIGTERM."""

Facts = dict[str, str | int | float | bool]
log = logging.getLogger("launch")
E_ = TypeVar("E_", bound=Event)


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

    def show(self, phase: str, done_nbytes: int, total_nbytes: int) -> None:
        """`done_nbytes` of `total_nbytes` of `phase` are through."""
        finished = done_nbytes >= total_nbytes
        text = f"{phase}: {done_nbytes / 1e6:,.0f} of {total_nbytes / 1e6:,.0f} MB"
        if self._live:
            print(f"\r\x1b[K{text}", end="\n" if finished else "", file=sys.stderr, flush=True)
        elif phase != self._phase or finished:
            print(text, file=sys.stderr, flush=True)
        self._phase = phase


class Engine:
    """The processes of one run. They are started in order and stopped in reverse."""

    def __init__(self, config: LaunchConfig, placement: Placement, progress: ProgressLine) -> None:
        self.notices: Notices = queue.SimpleQueue()
        self.scheduler_endpoint = ""
        self._config = config
        self._placement = placement
        self._progress = progress
        self._children: list[Child] = []
        self._run_id = f"ss{secrets.token_hex(4)}"

    def start(self, directory: Path, budget: Budget) -> Ready:
        """Start everything, with the sizes of `budget`; the scheduler's Ready. Raises as `_wait_for` does."""
        config, placement = self._config, self._placement
        common: dict[str, Any] = {"event_loop": config.event_loop, "log_level": config.log_level, "parent_pipe": True}
        common |= {"run_id": self._run_id, "device": placement.device}
        ordinals = [gpu.ordinal for gpu in placement.gpus] or [0] * config.workers
        copy_engine = ""
        if placement.copy_engine == "process":
            copy_engine = self._spawn("copyengine", "copyengine", CopyEngineConfig(ordinal=ordinals[0], **common))
        threads = max(1, (psutil.cpu_count(logical=False) or 1) - 1) // config.workers or 1  # a core is left to copies
        common |= {"copy_engine": copy_engine, "threads": threads}
        workers = [
            self._spawn(f"worker{i}", "worker", WorkerConfig(name=f"worker{i}", ordinal=ordinal, **common))
            for i, ordinal in enumerate(ordinals)
        ]
        serving = {name: getattr(config, name) for name in ServingConfig.__struct_fields__}
        serving["served_model_name"] = config.served_model_name or directory.name
        serving["kv_tokens"] = budget.kv_tokens
        if budget.slots:
            serving["slots"] = budget.slots
        self.scheduler_endpoint = self._spawn(
            "scheduler",
            "scheduler",
            SchedulerConfig(model=str(directory), workers=",".join(workers), parent_pipe=True, **serving),
        )
        return self._wait_for("scheduler", Ready, config.ready_timeout_s + LAST_WORD_S, "--ready-timeout-s")

    def serve(self) -> int:
        """Watch the processes until one ends or a signal comes; the exit code."""
        while True:
            match self._next():
                case Exited(name=name, code=code):
                    print(f"error: {name} ended with exit code {code}; stopping the rest", file=sys.stderr)
                    return 1
                case Told(signal="SIGTERM"):
                    return self._drain()
                case Told():
                    return 0

    def stop(self) -> None:
        """End all processes and remove what a killed one may have left in shared memory. A signal makes it short."""
        on_signals(lambda _: self._kill())
        for child in reversed(self._children):
            child.stop()
        reclaim_stale()

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    def _drain(self) -> int:
        scheduler = self._children[-1]
        print("finishing running requests; a second signal stops at once", file=sys.stderr)
        scheduler.drain()
        end = time.monotonic() + DRAIN_TIMEOUT_S
        while (notice := self._next(end)) is not None:
            match notice:
                case Exited(name=scheduler.name, code=0) | Told():
                    return 0
                case Exited(name=name, code=code):
                    print(f"error: {name} ended with exit code {code} while draining", file=sys.stderr)
                    return 1
        print(f"error: requests still running after {DRAIN_TIMEOUT_S:g} s", file=sys.stderr)
        return 1

    def _next(self, end: float = math.inf) -> Notice | None:
        """The next notice; None if there is none until `end` on the monotonic clock.

        Waits in short pieces: a signal that the system hands to another thread does not interrupt a wait of this one,
        and on Windows none does, but its handler runs between two waits.
        """
        while True:
            try:
                return self.notices.get(timeout=max(0.0, min(POLL_S, end - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= end:
                    return None

    def _spawn(self, name: str, module: str, config: msgspec.Struct) -> str:
        self._children.append(Child(name, module, cli.to_argv(config), self.notices))
        return self._wait_for(name, Listening, LISTEN_TIMEOUT_S, "").endpoint

    def _wait_for(self, name: str, kind: type[E_], timeout_s: float, knob: str) -> E_:
        """The next event of type `kind` of child `name`.

        Progress renews the deadline. PeerTimeout if it passes, PeerDied if any process ends first, ConfigError or
        what else a process reports as the reason it does not start, KeyboardInterrupt on a signal.
        """
        end = time.monotonic() + timeout_s
        while True:
            match self._next(end):
                case None:
                    more = f"; raise {knob} if the machine is only slow" if knob else ""
                    raise PeerTimeout(f"nothing was heard of {name} for {timeout_s:g} s{more}")
                case Said(event=StartFailed(code=code, detail=detail)):
                    raise from_code(code, detail)
                case Said(event=Progress() as seen):
                    self._progress.show(seen.phase, seen.done_nbytes, seen.total_nbytes)
                    end = time.monotonic() + timeout_s
                case Said(name=sender, event=event) if sender == name and isinstance(event, kind):
                    return event
                case Exited(name=sender, code=code):
                    raise PeerDied(f"{sender} ended with exit code {code} while starting")
                case Told():
                    raise KeyboardInterrupt


def preflight(config: LaunchConfig) -> Preflight:
    """The model and where it runs, checked, and what each worker will allocate.

    ConfigError if the model or the settings are no good, or the machine has too little of something.
    """
    placement = place(config.device, config.copy_engine, config.workers)
    resolve(config.event_loop)
    reclaim_stale()
    directory = Path(config.model) if config.model else builtin_model()
    model = open_model(directory, config.hf_overrides, config.load_format)
    dtype = model.spec.checkpoint_dtype if config.dtype == "auto" else config.dtype
    available_nbytes = psutil.virtual_memory().available
    budget = plan_memory(model.spec, dtype, placement, config.workers, available_nbytes, wanted(config))
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
    )


def builtin_model() -> Path:
    """The built-in model's directory; says so if it has to be made."""
    if not os.path.exists(cache_directory() / NAME):
        print(f"making the built-in model in {cache_directory()} (once)", file=sys.stderr, flush=True)
    return ensure_builtin()


def ready_block(model: Model, placement: Placement, ready: Ready, endpoint: str) -> str:
    """What a person needs to know once the engine serves."""
    facts = ready.facts
    age_s = time.time() - psutil.Process().create_time()
    several = int(facts["workers"]) > 1
    weights = "; random weights: the text means nothing" if model.random_weights else ""
    lines = {
        "endpoint": endpoint,
        "model": f"{facts['model']} ({model.spec.architecture}, {facts['dtype']}{weights})",
        "workers": f"{facts['workers']} on {facts['device']}" + ("; the sizes are each one's" if several else ""),
        "device": f"{placement.device}, {placement.reason}",
        **expert_lines(placement, facts),
        "KV": f"{facts['kv_tokens']} tokens, {_mb(facts['kv_nbytes'])}; one request may take {facts['max_model_len']}",
        "event loop": facts["event_loop"],
        "try": _client_command(endpoint),
    }
    return f"Ready in {age_s:.1f} s\n" + "\n".join(f"  {key:<12}{value}" for key, value in lines.items())


def expert_lines(placement: Placement, facts: Facts) -> dict[str, str]:
    """The Ready block's lines about experts."""
    memory = "pinned" if placement.gpus else "shared"
    because = f": {placement.copy_engine_reason}" if placement.copy_engine_reason else ""
    layers, experts, demand = facts["moe_layers"], facts["experts"], facts["demand_tokens"]
    if not layers:
        return {"experts": "none: a dense model, so that there is nothing to load on demand"}
    threshold = f"prefill chunks of up to {demand} tokens load only the experts they route to"
    return {
        "slots": f"{facts['slots']} of {int(layers) * int(experts)} experts, and {facts['stream_slots']} to stream "
        f"through; {_mb(facts['pool_nbytes'])}",
        "experts": f"{layers} layers x {experts}, {facts['experts_per_token']} per token; {_mb(facts['bank_nbytes'])} "
        f"of {memory} memory, copied by a {facts['copy_engine']}{because}",
        "demand": threshold if demand else "off: every prefill chunk streams all experts",
    }


def _mb(nbytes: str | float) -> str:
    return f"{float(nbytes) / 1e6:,.1f} MB"


def _client_command(endpoint: str) -> str:
    where = "" if endpoint == DEFAULT_ENDPOINT else f"--endpoint {endpoint} "
    return f'python -m scheduler.client {where}"Once upon a time"'


def on_signals(told: Callable[[str], object]) -> None:
    """Call `told` with the name of each signal that asks us to end, in place of what was called so far."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: told(signal.Signals(number).name))


def run(config: LaunchConfig) -> int:
    """Start, serve or answer, stop; the exit code. ConfigError if the start is refused."""
    configure_logging(config.log_level, "launch")
    model, placement, budget = preflight(config)
    log.info("device %s, %s", placement.device, placement.reason)
    engine = Engine(config, placement, ProgressLine())
    try:
        on_signals(lambda name: engine.notices.put(Told(name)))
        ready = engine.start(model.directory, budget)
        out = sys.stdout if config.prompt is None else sys.stderr  # standard output is the answer's
        print(ready_block(model, placement, ready, engine.scheduler_endpoint), file=out, flush=True)
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
