"""Starts the processes of a run, watches them, starts anew what dies, stops them. Decisions are restarts.py's.

Nobody watches the supervisor: while it is stopped the others go on serving, and what dies stays dead until it goes on.
"""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from copyengine.wire.child import KILLED_S, Child, Exited, Notice, Notices, Said, Told
from copyengine.wire.draining import Draining
from copyengine.wire.lifecycle import STOP_GRACE_S, Alive, Progress, Ready
from copyengine.wire.restarts import Action, GiveUp, Introduce, Kill, Patience, Restarts, Role, Say, Start, Stop
from copyengine.wire.watchdog import OwnTime, Watchdog

POLL_S = 0.25
"""Seconds after which a signal is seen at the latest."""

STOP_ALL_S = 8.0
"""Seconds after which all that were told to end and have not are killed, if no STOP_GRACE_S ends them sooner. What is
killed may take KILLED_S more until the system has ended it."""

HURRY_S = 1.2
"""The same after a second signal, of which whoever gave it expects an end in two seconds: the launcher's own end is
among them, and that of what is killed, which takes long only in a driver. What a step takes longer is cut off."""

TAKERS_SHARE = 0.5
"""The part of these after which the others are told, too, if those who take requests have not ended by then. Half of
STOP_ALL_S is more than the HTTP front gives answers and connections (scheduler/http/server.py), and leaves a worker's
last step and its memory the seconds they need; half of HURRY_S is more than the scheduler gives its clients
(scheduler/server.py)."""


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
        say: Callable[[str, str], None],
        on_progress: Callable[[Progress], None],
        on_end: Callable[[], object],
    ) -> None:
        """`command` is what starts a role, given the endpoints of what it needs and uses. `on_end` is called after
        each end of a process, before another one is started; `say` is given an event's name and its words."""
        self.notices: Notices = queue.SimpleQueue()
        self.draining = False  # what runs is finished, and then all ends
        self._hurried = False  # a second signal has said that not even that is waited for
        self._now_s = OwnTime()
        self._watchdog = Watchdog(patience.answer_s)
        self._drain_s = patience.drain_s
        self._takers = {role.name for role in roles if role.takes_requests}
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
        self._carry_out(self._restarts.begin(self._now_s()))
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
        """End all: first those who take requests, who tell their clients while the others still live.

        Those of each kind are told together, the last started first, so that a worker hears of the end before it misses
        its copy engine. Who has not ended in time is killed together: nobody's slow end takes the time of another's.
        """
        now_s, all_s = time.monotonic(), HURRY_S if self._hurried else STOP_ALL_S
        takers = [child for name, child in self._children.items() if name in self._takers]
        others = [child for name, child in self._children.items() if name not in self._takers][::-1]
        _tell_to_stop(takers)
        _late(takers, now_s + TAKERS_SHARE * all_s)
        _tell_to_stop(others)
        for child in _late([*others, *takers], min(now_s + all_s, time.monotonic() + STOP_GRACE_S)):
            child.kill()
        killed_s = time.monotonic() + KILLED_S
        for child in self._children.values():
            child.collect(killed_s - time.monotonic())

    def kill(self) -> None:
        """End all the hard way; `stop` still has to be called."""
        for child in self._children.values():
            child.kill()

    def _turn(self) -> Notice | None:
        """Wait for a notice, no longer than POLL_S, and do what it or the time asks for; the notice."""
        notice = self._next()
        if isinstance(notice, Said | Exited):
            self._hear(notice)
            self._carry_out(self._restarts.take(notice, self._now_s()))
        self._carry_out(self._restarts.tick(self._now_s()))
        self._watch(self._restarts.watched)
        return notice

    def _next(self) -> Notice | None:
        """The next notice; None if there is none for POLL_S.

        Short, since a signal that the system hands to another thread does not interrupt a wait of this one, and on
        Windows none does, but its handler runs between two waits.
        """
        try:
            return self.notices.get(timeout=POLL_S)
        except queue.Empty:
            return None

    def _watch(self, names: Sequence[str]) -> None:
        """Ask `names` whether they are alive, and end who does not answer."""
        look = self._watchdog.look(names, self._now_s())
        for name in look.ask:
            self._children[name].ask_whether_alive()
        for name in look.silent:
            self._carry_out(self._restarts.silent(name, self._watchdog.patience_s))

    def _hear(self, notice: Said | Exited) -> None:
        match notice:
            case Said(name=name, event=Alive()):
                self._watchdog.heard(name, self._now_s())
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
                case Say(event=event, text=text):
                    self._say(event, text)
                case GiveUp(error=error):
                    raise error

    def _drain(self) -> int:
        """Have running requests finished; nothing is started anew any more. The exit code."""
        takers = self._restarts.takers
        if not takers:  # then no request runs
            return 0
        self.draining = True
        self._say("drain", "finishing running requests; a second signal stops at once")
        for name in takers:
            self._children[name].drain()
        draining, end_s = Draining(takers), self._now_s() + self._drain_s
        while not draining.over:
            if self._now_s() >= end_s:
                self._say("drain_late", f"requests still running after {self._drain_s:g} s (--drain-timeout-s)")
                return 1
            if (notice := self._next()) is not None:
                self._take_in_drain(draining, notice)
            self._watch([name for name in self._restarts.watched if self._children[name].alive])
        self._hurried = draining.hurried
        return draining.code

    def _take_in_drain(self, draining: Draining, notice: Notice) -> None:
        if isinstance(notice, Said | Exited):
            self._hear(notice)
        expected = isinstance(notice, Exited) and self._restarts.phase(notice.name) == "ending"
        if text := draining.take(notice, expected):
            self._say("drain_death", text)


def _tell_to_stop(children: Sequence[Child]) -> None:
    for child in children:
        child.ask_to_stop()


def _late(children: Sequence[Child], end_s: float) -> list[Child]:
    """Wait for their ends; those that have not ended at `end_s` of the monotonic clock."""
    return [child for child in children if not child.ends(end_s - time.monotonic())]
