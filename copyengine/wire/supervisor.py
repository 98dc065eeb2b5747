"""Starts the processes of a run, watches them, starts anew what dies, stops them. Decisions are restarts.py's."""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from copyengine.wire.child import Child, Exited, Notice, Notices, Said, Told
from copyengine.wire.draining import Draining
from copyengine.wire.lifecycle import Progress, Ready
from copyengine.wire.restarts import Action, GiveUp, Introduce, Kill, Patience, Restarts, Role, Say, Start, Stop

POLL_S = 0.25
"""Seconds after which a signal is seen at the latest."""

DRAIN_TIMEOUT_S = 60.0
"""Seconds running requests may take to finish after SIGTERM."""


class Command(NamedTuple):
    """`python -m module argv`."""

    module: str
    argv: Sequence[str]


class Supervisor:
    """The processes of one run."""

    def __init__(
        self,
        roles: Sequence[Role],
        patience: Patience,
        command: Callable[[str, Mapping[str, str]], Command],
        say: Callable[[str], None],
        on_progress: Callable[[Progress], None],
        on_end: Callable[[], object],
    ) -> None:
        """`command` is what starts a role, given the endpoints of what it needs and uses. `on_end` is called after
        each end of a process, before another one is started."""
        self.notices: Notices = queue.SimpleQueue()
        self._order = [role.name for role in roles]
        self._restarts = Restarts(roles, patience)
        self._command = command
        self._say = say
        self._on_progress = on_progress
        self._on_end = on_end
        self._children: dict[str, Child] = {}
        self._ready: dict[str, Ready] = {}

    def start(self) -> None:
        """Start all, until all serve.

        PeerTimeout if nothing is heard for too long, PeerDied if one ends, ConfigError or what else a process reports
        as the reason it does not start, KeyboardInterrupt on a signal.
        """
        self._carry_out(self._restarts.begin(time.monotonic()))
        while not self._restarts.serving:
            if isinstance(self._turn(), Told):
                raise KeyboardInterrupt

    def ready(self, name: str) -> Ready:
        """What `name` said last when it was ready."""
        return self._ready[name]

    def serve(self) -> int:
        """Start anew what dies, until a signal comes; the exit code. PeerDied if that is given up."""
        while True:
            match self._turn():
                case Told(signal="SIGTERM"):
                    return self._drain()
                case Told():
                    return 0

    def endpoint(self, name: str) -> str:
        """Where `name` listens; empty if it does not."""
        return self._restarts.endpoint(name)

    def stop(self) -> None:
        """End all, the last first."""
        for name in reversed(self._order):
            if name in self._children:
                self._children[name].stop()

    def kill(self) -> None:
        """End all the hard way; `stop` still has to be called."""
        for child in self._children.values():
            child.kill()

    def _turn(self) -> Notice | None:
        """Wait for a notice, no longer than POLL_S, and do what it or the time asks for; the notice."""
        notice = self._next(time.monotonic() + POLL_S)
        if isinstance(notice, Said | Exited):
            self._hear(notice)
            self._carry_out(self._restarts.take(notice, time.monotonic()))
        self._carry_out(self._restarts.tick(time.monotonic()))
        return notice

    def _next(self, end_s: float) -> Notice | None:
        """The next notice; None if there is none until `end_s` on the monotonic clock.

        Waits in short pieces: a signal that the system hands to another thread does not interrupt a wait of this one,
        and on Windows none does, but its handler runs between two waits.
        """
        while True:
            try:
                return self.notices.get(timeout=max(0.0, min(POLL_S, end_s - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= end_s:
                    return None

    def _hear(self, notice: Said | Exited) -> None:
        match notice:
            case Said(event=Progress() as progress):
                self._on_progress(progress)
            case Said(name=name, event=Ready() as ready):
                self._ready[name] = ready
            case Exited(name=name):
                self._children[name].stop()  # closes its pipes
                self._on_end()

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Start(name=name, endpoints=endpoints):
                    command = self._command(name, endpoints)
                    self._children[name] = Child(name, command.module, command.argv, self.notices)
                case Stop(name=name):
                    self._children[name].ask_to_stop()
                case Kill(name=name):
                    self._children[name].kill()
                case Introduce(name=name, peer=peer):
                    self._children[name].introduce(peer)
                case Say(text=text):
                    self._say(text)
                case GiveUp(error=error):
                    raise error

    def _drain(self) -> int:
        """Have running requests finished; nothing is started anew any more. The exit code."""
        takers = self._restarts.takers
        if not takers:  # then no request runs
            return 0
        self._say("finishing running requests; a second signal stops at once")
        for name in takers:
            self._children[name].drain()
        draining, end_s = Draining(takers), time.monotonic() + DRAIN_TIMEOUT_S
        while not draining.over:
            notice = self._next(end_s)
            if notice is None:
                self._say(f"error: requests still running after {DRAIN_TIMEOUT_S:g} s")
                return 1
            expected = isinstance(notice, Exited) and self._restarts.phase(notice.name) == "ending"
            if text := draining.take(notice, expected):
                self._say(text)
        return draining.code
