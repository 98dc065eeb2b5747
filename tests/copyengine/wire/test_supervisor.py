"""A supervisor over real processes that do nothing else: who lives afterwards, what is said, the exit code."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil
import pytest

from copyengine.wire import supervisor as module
from copyengine.wire import watchdog
from copyengine.wire.child import Child, Exited, Told
from copyengine.wire.errors import PeerDied
from copyengine.wire.lifecycle import STOP_GRACE_S
from copyengine.wire.restarts import Patience, Role
from copyengine.wire.supervisor import Command, Supervisor

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills as POSIX does")

CHILD = "tests.copyengine.wire.lifelike_child"
ROLES = (
    Role("copyengine"),
    Role("worker", needs=("copyengine",)),
    Role("scheduler", uses=("worker",), takes_requests=True),
    Role("http", calls=("scheduler",), takes_requests=True, spare=True),
)
PATIENCE = Patience(listen_s=30, serve_s=30, end_s=0.5, knob="--patience")
BRIEF = Patience(listen_s=30, serve_s=30, end_s=0.5, knob="--patience", drain_s=1.0)
WATCHFUL = Patience(listen_s=30, serve_s=30, end_s=0.5, knob="--patience", answer_s=1.0)


class Run:
    """A supervisor that serves in a thread, and what it said."""

    def __init__(self, habits: Mapping[str, str], patience: Patience) -> None:
        self.said: list[str] = []
        self.ends = 0
        self.outcome: int | Exception | None = None
        self.habits = dict(habits)  # of those that are started from now on
        self.supervisor = Supervisor(ROLES, patience, self._command, self._hear, lambda _: None, self._count_end)
        self._thread = threading.Thread(target=self._serve)

    def _hear(self, event: str, text: str) -> None:
        self.said.append(text)

    def _command(self, name: str, endpoints: Mapping[str, str]) -> Command:
        return Command(CHILD, [name, *self.habits.get(name, "").split()])

    def _count_end(self) -> None:
        self.ends += 1

    def _serve(self) -> None:
        try:
            self.outcome = self.supervisor.serve()
        except PeerDied as error:
            self.outcome = error

    def start(self) -> None:
        self.supervisor.start()
        assert self.supervisor.ready("scheduler").facts == {"name": "scheduler"}
        self._thread.start()

    def process(self, name: str) -> psutil.Process:
        return psutil.Process(int(self.supervisor.endpoint(name).split(":")[1]))

    def kill(self, name: str) -> None:
        self.process(name).kill()

    def tell(self, name: str) -> None:
        self.supervisor.notices.put(Told(name))

    def end(self) -> int | Exception | None:
        """What `serve` came to."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.outcome

    def until(self, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not met():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.01)


@contextmanager
def running(patience: Patience = PATIENCE, **habits: str) -> Iterator[Run]:
    """A run that serves; nothing of it is left afterwards."""
    run = Run(habits, patience)
    try:
        run.start()
        yield run
    finally:
        run.tell("SIGINT")
        if run.outcome is None:
            run.end()
        run.supervisor.stop()
        assert not [child for child in psutil.Process().children() if CHILD in _argv(child)]


def _argv(process: psutil.Process) -> list[str]:
    try:
        argv: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return argv


def test_it_serves_again_and_stops_when_told() -> None:
    with running() as run:
        for times, name in enumerate(("worker", "copyengine", "scheduler"), 1):
            run.kill(name)
            run.until(lambda: len(run.said) == 2 * times)  # noqa: B023
        assert [line.split(";")[0] for line in run.said[::2]] == [
            f"{name} was killed by SIGKILL" for name in ("worker", "copyengine", "scheduler")
        ]
        assert all(line.startswith("serving again after") for line in run.said[1::2])
        assert run.ends == 4, "the worker fell with the copy engine"
        run.tell("SIGINT")
        assert run.end() == 0


def test_too_many_deaths_end_it() -> None:
    with running() as run:
        for times in range(1, 5):
            run.kill("scheduler")
            run.until(lambda: len(run.said) == 2 * times)  # noqa: B023
        run.kill("worker")
        error = run.end()
        assert str(error) == "given up after 5 deaths in a row; the first: scheduler was killed by SIGKILL"


def test_who_does_not_fall_is_pushed() -> None:
    with running(worker="stubborn") as run:
        stubborn = run.process("worker")
        run.habits.clear()
        run.kill("copyengine")
        run.until(lambda: len(run.said) == 2)
        assert not stubborn.is_running() and run.process("worker") != stubborn


def test_a_drain_ends_with_the_last_request() -> None:
    with running() as run:
        run.tell("SIGTERM")
        assert run.end() == 0
        assert run.said == ["finishing running requests; a second signal stops at once"]


@pytest.mark.parametrize("late", ["scheduler", "http"])
def test_a_drain_waits_for_all_who_take_requests(late: str) -> None:
    with running(BRIEF, **{late: "busy"}) as run:
        run.tell("SIGTERM")
        assert run.end() == 1
        assert run.said[1:] == ["requests still running after 1 s (--drain-timeout-s)"]


def test_a_drain_with_nobody_to_drain_ends_at_once() -> None:
    """Who takes requests has just been started anew and says nothing yet: nothing runs."""
    with running() as run:
        run.habits.update(scheduler="mute", http="mute")
        run.kill("scheduler")
        run.kill("http")
        run.until(lambda: len(run.said) == 2)
        run.tell("SIGTERM")
        assert run.end() == 0
        assert "finishing running requests" not in str(run.said)


def test_a_drain_waits_for_no_restart() -> None:
    """What runs elsewhere is finished, and what is just starting anew is not needed for it."""
    with running() as run:
        run.habits["worker"] = "mute"
        run.kill("worker")
        run.until(lambda: len(run.said) == 1)
        run.tell("SIGTERM")
        assert run.end() == 0
        assert run.said[1:] == ["finishing running requests; a second signal stops at once"]


def test_a_second_signal_ends_a_drain() -> None:
    with running(scheduler="busy") as run:
        run.tell("SIGTERM")
        run.until(lambda: bool(run.said))
        assert run.outcome is None
        run.tell("SIGTERM")
        assert run.end() == 0


def test_a_death_in_a_drain_is_said_and_starts_nobody() -> None:
    """The requests of others run on until the drain's own end, here its deadline, and the exit code tells."""
    with running(BRIEF, scheduler="busy") as run:
        worker = run.process("worker")
        run.tell("SIGTERM")
        run.until(lambda: bool(run.said))
        worker.send_signal(signal.SIGKILL)
        assert run.end() == 1
        assert run.said[1:] == [
            "worker was killed by SIGKILL while draining",
            "requests still running after 1 s (--drain-timeout-s)",
        ]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who serves is asked whether it is alive at each turn."""
    monkeypatch.setattr(watchdog, "ASK_S", 0.0)


@pytest.mark.parametrize("name", ["copyengine", "worker", "scheduler", "http"])
def test_who_is_stopped_for_good_is_killed_and_started_anew(often: None, name: str) -> None:
    with running(WATCHFUL) as run:
        stopped = run.process(name)
        stopped.suspend()
        run.until(lambda: len(run.said) == 2)
        assert not stopped.is_running() and run.process(name) != stopped
        assert run.said[0].startswith(f"{name} was killed by SIGKILL: it has answered nothing for 1 s")
        assert run.said[1].startswith("serving again after")


def test_whose_loop_hangs_is_killed_too(often: None) -> None:
    """Its threads run on, and one of them still reads what it is asked."""
    with running(WATCHFUL, worker="deaf") as run:
        run.habits.clear()
        run.until(lambda: len(run.said) == 2)
        assert run.said[0].startswith("worker was killed by SIGKILL: it has answered nothing for 1 s")


def test_who_is_stopped_for_less_goes_on(often: None) -> None:
    with running(WATCHFUL) as run:
        processes = [run.process(role.name) for role in ROLES]
        for _ in range(5):
            for process in processes:
                process.suspend()
            time.sleep(0.4)
            for process in processes:
                process.resume()
            time.sleep(0.3)
        assert not run.said and all(process.is_running() for process in processes)


def test_who_takes_requests_and_hangs_ends_a_drain_sooner(often: None) -> None:
    with running(WATCHFUL, scheduler="busy") as run:
        run.process("scheduler").suspend()
        run.tell("SIGTERM")
        assert run.end() == 1
        assert run.said[1:] == ["scheduler was killed by SIGKILL while draining"]


def test_all_who_hang_are_ended_together_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matter how many: each by itself would have STOP_GRACE_S."""
    monkeypatch.setattr(module, "STOP_ALL_S", 0.5)
    with running() as run:
        for role in ROLES:
            run.process(role.name).suspend()
        run.tell("SIGINT")
        assert run.end() == 0
        start_s = time.monotonic()
        run.supervisor.stop()
        assert time.monotonic() - start_s < STOP_GRACE_S


@pytest.mark.parametrize("stuck", ["http", "scheduler", "worker", "copyengine"])
def test_who_does_not_end_takes_no_time_of_the_others(monkeypatch: pytest.MonkeyPatch, stuck: str) -> None:
    """Against their exit codes: who is killed has none of its own."""
    monkeypatch.setattr(module, "STOP_ALL_S", 2.0)
    names = [role.name for role in ROLES]
    with running(PATIENCE, **{name: "stubborn" if name == stuck else "slow" for name in names}) as run:
        run.tell("SIGINT")
        assert run.end() == 0
        run.supervisor.stop()
        codes = {}
        while not run.supervisor.notices.empty():
            if isinstance(notice := run.supervisor.notices.get(), Exited):
                codes[notice.name] = notice.code
        assert codes == {name: -signal.SIGKILL if name == stuck else 0 for name in names}


def test_who_cannot_be_killed_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All four together for KILLED_S, not each."""
    with running(PATIENCE, **dict.fromkeys((role.name for role in ROLES), "stubborn")) as run:
        run.tell("SIGINT")
        assert run.end() == 0
        with monkeypatch.context() as patch:
            patch.setattr(module, "STOP_ALL_S", 0.1)
            patch.setattr(module, "KILLED_S", 1.0)
            patch.setattr(Child, "kill", lambda child: None)
            start_s = time.monotonic()
            run.supervisor.stop()
            assert time.monotonic() - start_s < 3


def test_after_a_second_signal_nobody_is_waited_for_long() -> None:
    with running(scheduler="busy", worker="stubborn") as run:
        run.tell("SIGTERM")
        run.until(lambda: bool(run.said))
        assert run.supervisor.draining
        run.tell("SIGTERM")
        assert run.end() == 0
        start_s = time.monotonic()
        run.supervisor.stop()
        assert time.monotonic() - start_s < module.HURRY_S + 2
