"""Starts the whole engine: copy engine, workers, scheduler; starts anew what dies; stops them.

`python launch.py --workers 1 --demand-tokens 512` serves until Ctrl-C; `--prompt TEXT` answers once and exits,
`--check` says what a start would take.
Exit codes: 0 as asked, 1 processes died and were given up, 2 the start was refused.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `main`: Ctrl-C during the imports shows no traceback

import io
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
from msgspec.structs import replace

from copyengine.config import CopyEngineConfig
from copyengine.device.host import reclaim_stale
from copyengine.link_rate import gpu_rate, host_rate
from copyengine.placement import Placement
from copyengine.wire import cli
from copyengine.wire.child import Told
from copyengine.wire.errors import ConfigError, SlotstreamError
from copyengine.wire.lifecycle import EXIT_CONFIG, STOP_GRACE_S, Ready
from copyengine.wire.logs import Log, configure_logging
from copyengine.wire.restarts import Patience, Role
from copyengine.wire.standard_streams import open_closed_streams
from copyengine.wire.supervisor import Command, Supervisor
from scheduler import client_cli
from scheduler.check import Settings, report
from scheduler.config import DEFAULT_PORT, LaunchConfig, SchedulerConfig, ServingConfig
from scheduler.http.config import HttpConfig
from scheduler.live_status import LiveStatus
from scheduler.port_claims import claimed_ports
from scheduler.preflight import Preflight, check_serving, inspect, preflight, wanted
from scheduler.progress_line import ProgressLine
from scheduler.ready_block import ready_block
from worker.config import WorkerConfig

LISTEN_TIMEOUT_S = 30.0
"""Seconds a process may take to bind its socket: Python's start and the imports of zmq, 0.3 s on an idle machine. Fewer
would refuse a start on a busy one, of a disk that spins up; more only say later that something is stuck."""

LAST_WORD_S = 20.0
"""Seconds beyond --ready-timeout-s that the processes have to say themselves what did not start: longer than the
scheduler's LOAD_MARGIN_S beyond it, so that who knows the cause speaks first."""

log = Log("launch")


class Engine:
    """The processes of one run: which there are, and what each is started with."""

    def __init__(self, config: LaunchConfig, found: Preflight, progress: ProgressLine) -> None:
        self.scheduler_endpoint = ""
        self.url = ""  # of the HTTP front, if there is one
        self._config = config
        self._found = found
        self._run_id = f"ss{secrets.token_hex(4)}"
        self._supervisor = Supervisor(
            roles(config.workers, found.placement, http=config.http_port is not None),
            Patience(
                LISTEN_TIMEOUT_S,
                config.ready_timeout_s + LAST_WORD_S,
                STOP_GRACE_S,
                "--ready-timeout-s",
                config.watchdog_s,
                config.drain_timeout_s,
            ),
            self.command,
            say=lambda event, text: log.warning(event, detail=text),
            on_progress=progress.show,
            on_end=reclaim_stale,
        )

    def start(self) -> Ready:
        """Start everything; the scheduler's Ready. Raises as Supervisor.start does."""
        self._supervisor.start()
        self.scheduler_endpoint = self._supervisor.endpoint("scheduler")
        if self._config.http_port is not None:
            self.url = self._supervisor.endpoint("http")
        return self._supervisor.ready("scheduler")

    def serve(self) -> int:
        """Serve until a signal comes; the exit code. PeerDied if too many processes die.

        Meanwhile a terminal shows what is going on.
        """
        supervisor = self._supervisor
        with LiveStatus(self.scheduler_endpoint, sys.stderr, self._config.event_loop, lambda: supervisor.draining):
            return supervisor.serve()

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
        if name == "http":
            return Command("scheduler.http", cli.to_argv(self._http_config(endpoints["scheduler"])))
        if name == "copyengine":
            return Command("copyengine", cli.to_argv(CopyEngineConfig(ordinal=ordinals[0], **on_device)))
        worker = WorkerConfig(
            name=name,
            ordinal=ordinals[worker_names(config.workers).index(name)],
            copy_engine=endpoints.get("copyengine", ""),
            deterministic=config.deterministic,
            threads=compute_threads(config.workers, config.deterministic),
            **on_device,
        )
        return Command("worker", cli.to_argv(worker))

    def _scheduler_config(self, endpoints: Mapping[str, str]) -> SchedulerConfig:
        """With the sizes that were planned. Started anew, it listens where its clients know it."""
        config, budget, directory = self._config, self._found.budget, self._found.model.directory
        serving = {name: getattr(config, name) for name in ServingConfig.__struct_fields__}
        serving["served_model_name"] = config.served_model_name or directory.name
        serving["kv_tokens"] = budget.kv_tokens
        if budget.state_slots:
            serving["state_slots"] = budget.state_slots
        if budget.slots:
            serving["slots"] = budget.slots
        if self.scheduler_endpoint:
            serving["port"] = int(self.scheduler_endpoint.rsplit(":", 1)[1])
        workers = ",".join(endpoints[name] for name in worker_names(config.workers))
        return SchedulerConfig(model=str(directory), workers=workers, parent_pipe=True, **serving)

    def _http_config(self, scheduler: str) -> HttpConfig:
        """Started anew, the front listens where its clients know it."""
        config, directory = self._config, self._found.model.directory
        shared = {name: getattr(config, name) for name in HttpConfig.__struct_fields__ if hasattr(config, name)}
        shared["model"] = str(directory)
        shared["served_model_name"] = config.served_model_name or directory.name
        if self.url:
            shared["http_port"] = int(self.url.rsplit(":", 1)[1])
        return HttpConfig(scheduler=scheduler, parent_pipe=True, **shared)


def worker_names(workers: int) -> list[str]:
    """What the workers are called, in the order in which the scheduler is given their endpoints."""
    return [f"worker{i}" for i in range(workers)]


def compute_threads(workers: int, deterministic: bool) -> int:
    """Of each worker: it shares the cores, but for one that is left to copies. A deterministic one shares none with the
    others, since the bits of a product may depend on this number, and answers are not to on how many workers there are.
    """
    cores = max(1, (psutil.cpu_count(logical=False) or 1) - 1)
    return cores if deterministic else cores // workers or 1


def roles(workers: int, placement: Placement, http: bool = False) -> list[Role]:
    """The processes in the order of their start: rest_for_one, but that the scheduler outlives what it works with.

    The HTTP front is a client like others: it needs no scheduler but to be started with. However often it dies, it
    ends no run: ZMQ's clients would lose their answers by it, and a restart of it costs nobody anything.
    """
    needs = ("copyengine",) if placement.copy_engine == "process" else ()
    names = worker_names(workers)
    front = [Role("http", calls=("scheduler",), takes_requests=True, spare=True)] if http else []
    scheduler = Role("scheduler", uses=tuple(names), takes_requests=True)
    return [*map(Role, needs), *(Role(name, needs=needs) for name in names), scheduler, *front]


def check(config: LaunchConfig) -> int:
    """Print what a start would take and could be hoped to give; 0 if it would go through. ConfigError if not."""
    found = inspect(config, say)
    asked = wanted(config, config.workers)
    survey = found.plan.survey(asked)
    gpus = found.placement.gpus
    rate = gpu_rate(gpus[0].ordinal) if gpus else host_rate()
    settings = Settings(asked, config.demand_tokens, config.collect_stats, config.deterministic)
    where = f"{found.placement.device}, {found.placement.reason}"
    print(f"{found.model.directory} ({found.model.spec.architecture}, {found.plan.dtype}) on {where}\n")
    print(report(found.plan, survey, settings, rate), flush=True)
    refusal = found.plan.refusal(survey, asked)
    if refusal:
        raise ConfigError(refusal)
    check_serving(config, found.model, survey.budget)
    print("\nit fits")
    return 0


def say(text: str) -> None:
    """To whoever started us, beside what standard output is for."""
    print(text, file=sys.stderr, flush=True)


def on_signals(told: Callable[[str], object]) -> None:
    """Call `told` with the name of each signal that asks us to end, in place of what was called so far."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: told(signal.Signals(number).name))


def run(config: LaunchConfig) -> int:
    """Start, serve or answer, stop; the exit code. ConfigError if the start is refused."""
    configure_logging(config.log_level, "launch")
    if config.check:
        return check(config)
    if config.prompt is not None and config.port == DEFAULT_PORT:
        config = replace(config, port=0)  # nobody else needs to find it: it may run beside another engine
    with claimed_ports(config):
        found = preflight(config, say)
        model, placement = found.model, found.placement
        log.info("start", model=str(model.directory), device=placement.device, detail=placement.reason)
        code = 1
        try:
            code = start_and_serve(config, found)
            return code
        except BaseException as error:
            code = exit_code(error)
            raise
        finally:
            log.info("end", code=code)


def start_and_serve(config: LaunchConfig, found: Preflight) -> int:
    """From the first process to the end of the last; the exit code. Raises as Engine.start and Engine.serve do."""
    engine, start_s = Engine(config, found, ProgressLine()), time.monotonic()
    try:
        on_signals(engine.told)
        ready = engine.start()
        out = sys.stdout if config.prompt is None else sys.stderr  # standard output is the answer's
        where = engine.scheduler_endpoint, engine.url, bool(config.api_key)
        print(ready_block(found.model, found.placement, ready, *where), file=out, flush=True)
        log.info("ready", endpoint=engine.scheduler_endpoint, http=engine.url, took_s=time.monotonic() - start_s)
        return engine.serve() if config.prompt is None else answer(config, engine.scheduler_endpoint)
    finally:
        engine.stop()


def exit_code(error: BaseException) -> int:
    """What a run ends with that `error` has ended."""
    match error:
        case ConfigError():
            return EXIT_CONFIG
        case KeyboardInterrupt():  # a signal before all served
            return 0
        case _:
            return 1


def answer(config: LaunchConfig, endpoint: str) -> int:
    """Answer --prompt as the client command does; its exit code, also when a signal ends it."""
    on_signals(lambda _: signal.raise_signal(signal.SIGINT))  # the event loop turns that one into a cancellation
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert config.prompt is not None
    return client_cli.main(["--endpoint", endpoint, "--event-loop", config.event_loop, "--", config.prompt])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an output that is not UTF-8 gets what it can of a model's name
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(cli.parse(LaunchConfig, argv, "launch.py"))
    except SlotstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt as error:
        return exit_code(error)
    except (
        BrokenPipeError
    ) as error:  # whoever read our output is gone; keep the interpreter from flushing into it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
