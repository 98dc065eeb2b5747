"""What is started anew, against a simulation of processes that live, listen, speak and die as real ones do."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copyengine.wire.child import Exited, Said
from copyengine.wire.deaths import MOST_DEATHS, MOST_PAUSE_S, QUIET_S
from copyengine.wire.errors import ConfigError, PeerDied, PeerTimeout, SlotstreamError
from copyengine.wire.lifecycle import (
    EXIT_CONFIG,
    EXIT_PEER,
    Event,
    Joined,
    Listening,
    Peer,
    PeerLost,
    Progress,
    Ready,
    StartFailed,
)
from copyengine.wire.restarts import Action, GiveUp, Introduce, Kill, Patience, Restarts, Role, Say, Start, Stop

ROLES = (
    Role("copyengine"),
    Role("worker0", needs=("copyengine",)),
    Role("worker1", needs=("copyengine",)),
    Role("scheduler", uses=("worker0", "worker1"), takes_requests=True),
    Role("http", calls=("scheduler",), takes_requests=True, spare=True),
)
WORKERS = ("worker0", "worker1")
PATIENCE = Patience(listen_s=30, serve_s=140, end_s=5, knob="--ready-timeout-s")
KILLED = -9


class Process:
    """One started process: what it was given, and which workers a scheduler has heard of and taken."""

    def __init__(self, start: Start, endpoint: str) -> None:
        self.name = start.name
        self.given = start.endpoints
        self.endpoint = endpoint
        self.listens = self.ready = self.ending = False
        self.to_take: deque[Peer] = deque()
        self.works_with = dict(start.endpoints) if start.name == "scheduler" else {}


class World:
    """Runs the actions and reports what happens, but later: `deliver` hands over a process's next notice.

    Each process has a pipe of its own, so that what two of them say may be heard in either order.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.restarts = Restarts(ROLES, PATIENCE)
        self.living: dict[str, Process] = {}
        self.pipes: dict[str, deque[Said | Exited]] = {role.name: deque() for role in ROLES}
        self.said: list[str] = []
        self.given_up: SlotstreamError | None = None
        self.starts: list[str] = []
        self.taken: set[str] = set()  # endpoints of workers that a scheduler has said it works with
        self._carry_out(self.restarts.begin(self.now_s))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            assert self.given_up is None
            match action:
                case Start(name=name):
                    assert name not in self.living, "two of one name"
                    assert all(action.endpoints.values())
                    self.starts.append(name)
                    self.living[name] = Process(action, f"{name}:{len(self.starts)}")
                case Stop(name=name) if name in self.living:
                    self.living[name].ending = True
                case Kill(name=name):
                    self.die(name, KILLED)
                case Introduce(name=name, peer=peer) if name in self.living:
                    self.living[name].to_take.append(peer)
                case Say(text=text):
                    self.said.append(text)
                case GiveUp(error=error):
                    self.given_up = error

    def say(self, name: str, event: Event) -> None:
        self.pipes[name].append(Said(name, event))

    def die(self, name: str, code: int) -> None:
        if self.living.pop(name, None):
            self.pipes[name].append(Exited(name, code))

    def deliver(self, name: str) -> None:
        if self.pipes[name] and self.given_up is None:
            self._carry_out(self.restarts.take(self.pipes[name].popleft(), self.now_s))
            serving = {self.restarts.endpoint(name) for name in WORKERS if self.restarts.phase(name) == "serving"}
            assert serving <= self.taken | {""}

    def deliver_all(self) -> None:
        while any(self.pipes.values()) and self.given_up is None:
            for name in self.pipes:
                self.deliver(name)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        if self.given_up is None:
            self._carry_out(self.restarts.tick(self.now_s))

    def advance(self, process: Process) -> bool:
        """What the process would do next by itself; False if nothing."""
        if process.ending:
            self.die(process.name, 0)
        elif process.name in WORKERS and process.listens and not self._lives(process.given["copyengine"]):
            self.die(process.name, EXIT_PEER)
        elif not process.listens:
            process.listens = True
            self.say(process.name, Listening(process.endpoint))
        elif not process.ready:
            if process.name != "http" and not all(map(self._lives, process.given.values())):
                return False  # a connection to nobody is no error: it waits
            process.ready = True
            self.taken.update(process.works_with.values())
            self.say(process.name, Ready({}))
        elif process.to_take:
            peer = process.to_take.popleft()
            if self._lives(peer.endpoint):
                process.works_with[peer.name] = peer.endpoint
                self.taken.add(peer.endpoint)
                self.say(process.name, Joined(peer.name, peer.endpoint))
        else:
            return False
        return True

    def _lives(self, endpoint: str) -> bool:
        return any(process.endpoint == endpoint and process.listens for process in self.living.values())

    def settle(self) -> None:
        """Until nothing happens any more, also after the longest pause before a start."""
        paused_s = 0.0
        for _ in range(500):
            moved = [self.advance(process) for process in list(self.living.values())]
            if not any(self.pipes.values()) and not any(moved):
                if self.restarts.serving or paused_s > MOST_PAUSE_S:
                    return
                paused_s += 1.0
                self.wait(1.0)
            self.deliver_all()
            if self.given_up is not None:
                return
        raise AssertionError("it never comes to rest")

    def check_serving(self) -> None:
        """All live, with each other."""
        assert self.restarts.serving and set(self.living) == {role.name for role in ROLES}
        engine, scheduler = self.living["copyengine"].endpoint, self.living["scheduler"]
        assert all(self.living[name].given == {"copyengine": engine} for name in WORKERS)
        assert scheduler.works_with == {name: self.living[name].endpoint for name in WORKERS}
        assert self.restarts.endpoint("scheduler") == scheduler.endpoint
        assert self.restarts.takers == ["scheduler", "http"]


def served() -> World:
    world = World()
    world.settle()
    world.check_serving()
    assert world.starts == [role.name for role in ROLES] and not world.said
    return world


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.sampled_from(ROLES), st.sampled_from(["die", "advance", "advance", "deliver", "deliver"])))
)
def test_whatever_dies_whenever_all_serve_again(history: list[tuple[Role, str]]) -> None:
    """Deaths at any moment, also of what is just starting or ending, and however late each is heard of."""
    world = served()
    row = 0
    for role, what in history:
        name = role.name
        if what == "deliver":
            world.deliver(name)
        elif name in world.living and what == "advance":
            world.advance(world.living[name])
        elif what == "die" and row < 2:  # what comes of one death, such as a scheduler that was loading, is another one
            row += 1
            world.die(name, KILLED)
        elif what == "die":
            world.settle()
            world.wait(QUIET_S)
            row = 0
    world.settle()
    assert world.given_up is None
    world.check_serving()
    assert len([line for line in world.said if line.startswith("serving again")]) <= len(world.starts)


@pytest.mark.parametrize(
    ("dead", "anew"),
    [
        ("copyengine", ["copyengine", "worker0", "worker1"]),
        ("worker0", ["worker0"]),
        ("worker1", ["worker1"]),
        ("scheduler", ["scheduler"]),
        ("http", ["http"]),
    ],
)
def test_a_death_takes_down_those_that_need_the_dead(dead: str, anew: list[str]) -> None:
    world = served()
    untouched = {name: world.living[name] for name in world.living if name not in anew}
    world.die(dead, KILLED)
    world.settle()
    world.check_serving()
    assert world.starts[len(ROLES) :] == anew
    assert all(world.living[name] is process for name, process in untouched.items())
    how_many = "death 1 in a row" if dead == "http" else "death 1 in a row; 5 give up"
    assert world.said == [
        f"{dead} was killed by SIGKILL; starting {', '.join(anew)} anew ({how_many})",
        "serving again after 0.0 s",
    ]


def test_workers_that_end_for_want_of_a_copy_engine_are_no_deaths() -> None:
    """Whether its end or theirs is heard of first, and also if it hangs: then it is killed."""
    for order in (["copyengine", "worker0", "worker1"], ["worker0", "copyengine", "worker1"], ["worker0", "worker1"]):
        world = served()
        for name in order:
            world.die(name, KILLED if name == "copyengine" else EXIT_PEER)
            world.deliver(name)
        world.settle()
        world.check_serving()
        assert world.restarts.deaths.in_a_row == 1
        assert world.said[0].startswith("copyengine was killed by SIGKILL")
        assert sorted(world.starts[len(ROLES) :]) == ["copyengine", "worker0", "worker1"]


@pytest.mark.parametrize("order", [("scheduler", "worker0"), ("worker0", "scheduler"), ("scheduler", "copyengine")])
def test_a_scheduler_that_waits_for_a_dead_worker_is_started_anew(order: tuple[str, str]) -> None:
    """Both died at once, and it may have been started before the other's death was heard of. Two deaths, not three."""
    world = served()
    for name in order:
        world.die(name, KILLED)
    for name in order:
        world.deliver(name)
    world.settle()
    world.check_serving()
    assert world.restarts.deaths.in_a_row == 2
    if order == ("scheduler", "worker0"):
        assert world.starts[len(ROLES) :] == ["scheduler", "worker0", "scheduler"]
        assert "starting worker0, scheduler anew" in world.said[1]


def test_who_calls_another_serves_without_it_and_is_told_nothing() -> None:
    """It is started once the other listens, long before that one is ready, of which its own being so says nothing."""
    world = World()
    while "http" not in world.living:
        for process in list(world.living.values()):
            if process.name != "scheduler" or not process.listens:
                world.advance(process)
        world.deliver_all()
    assert world.living["http"].given == {"scheduler": world.living["scheduler"].endpoint}
    for _ in range(2):
        world.advance(world.living["http"])
        world.deliver_all()
    assert (world.restarts.phase("http"), world.restarts.phase("scheduler")) == ("serving", "listening")
    assert world.restarts.takers == ["http"] and not world.restarts.serving
    world.settle()
    world.check_serving()
    restart(world, "scheduler")
    assert (world.restarts.phase("http"), world.restarts.takers) == ("serving", ["http"])
    assert not world.living["http"].to_take


def restart(world: World, name: str) -> None:
    """`name` dies and its successor listens; all of that is heard."""
    world.die(name, KILLED)
    world.deliver(name)
    world.wait(world.restarts.deaths.pause_s)
    world.advance(world.living[name])
    world.deliver(name)


def test_a_worker_does_not_serve_before_the_scheduler_says_so_of_this_one() -> None:
    """What the scheduler said of the one before is heard when the next one listens already."""
    world = served()
    restart(world, "worker0")
    world.advance(world.living["scheduler"])  # says Joined
    restart(world, "worker0")
    world.deliver("scheduler")
    assert world.restarts.phase("worker0") == "listening"
    world.settle()
    world.check_serving()


def test_nothing_is_started_with_a_copy_engine_that_is_given_up() -> None:
    """Although its end is not heard of yet, and something else makes one look for what can be started."""
    world = served()
    world.die("worker0", EXIT_PEER)
    world.die("scheduler", KILLED)
    world.deliver("worker0")
    world.deliver("scheduler")
    assert "copyengine" not in world.living and "worker0" not in world.living
    world.settle()
    world.check_serving()


@pytest.mark.parametrize("said_first", [True, False])
def test_who_ends_a_copy_engine_and_why_is_told(said_first: bool) -> None:
    """A worker has said why it parts with it; the scheduler misses the worker before or after."""
    world = served()
    why, at = "damaged experts in 3 steps", world.restarts.endpoint("worker0")
    words = [
        Said("worker0", StartFailed("peer_died", why)),
        Said("scheduler", PeerLost("worker0", at, "peer_died", "it is gone")),
    ]
    for said in words if said_first else words[::-1]:
        world.restarts.take(said, world.now_s)
    world.die("worker0", EXIT_PEER)
    world.settle()
    world.check_serving()
    because = f"launch kills it if it still runs, because worker0 ended with exit code 3: {why};"
    assert world.said[0].startswith(f"copyengine was killed by SIGKILL: {because}")


def test_five_deaths_in_a_row_are_given_up_with_the_first_cause() -> None:
    world = served()
    world.die("worker1", KILLED)
    world.settle()
    for _ in range(MOST_DEATHS - 1):
        assert world.given_up is None
        world.wait(QUIET_S - 1)
        world.die("scheduler", 1)
        world.settle()
    assert isinstance(world.given_up, PeerDied)
    assert str(world.given_up).endswith("5 deaths in a row; the first: worker1 was killed by SIGKILL")


def test_each_death_of_a_row_is_followed_by_a_longer_pause() -> None:
    """Against the table: none, 1, 2, 4 s; nobody else waits for it, and it is said."""
    world = served()
    for death, pause_s in enumerate((0, 1, 2, 4), 1):
        world.die("worker0", KILLED)
        world.deliver_all()
        assert (f"after a pause of {pause_s} s" in world.said[-1]) == (pause_s > 0), world.said[-1]
        if pause_s:
            world.wait(pause_s - 0.1)
            assert "worker0" not in world.living
            world.wait(0.1)
        assert "worker0" in world.living
        world.settle()
        world.check_serving()
        assert world.restarts.deaths.in_a_row == death
        assert world.starts == [*(role.name for role in ROLES), *["worker0"] * death]


def test_a_spare_process_ends_no_run_however_often_it_dies() -> None:
    """Not by a refusal to start anew either. Its deaths are not those of others, whose row a quiet minute ends."""
    world = served()
    for _ in range(3 * MOST_DEATHS):
        world.die("http", KILLED)
        world.settle()
        world.check_serving()
    world.die("http", KILLED)
    world.deliver_all()
    assert world.said[-1].endswith(f"anew (death {3 * MOST_DEATHS + 1} in a row; after a pause of {MOST_PAUSE_S:g} s)")
    world.wait(MOST_PAUSE_S)
    world.say("http", StartFailed("config", "the port is taken"))
    world.die("http", EXIT_CONFIG)
    world.deliver_all()
    assert "http ended with exit code 2: the port is taken" in world.said[-1]
    for _ in range(MOST_DEATHS - 1):
        world.die("worker0", KILLED)
        world.settle()
    world.wait(QUIET_S)
    world.die("http", KILLED)
    world.settle()
    world.die("worker0", KILLED)
    world.settle()
    assert world.given_up is None and world.restarts.deaths.in_a_row == 1
    world.check_serving()


def test_a_quiet_minute_forgives() -> None:
    world = served()
    for _ in range(3 * MOST_DEATHS):
        world.die("worker0", KILLED)
        world.settle()
        world.wait(QUIET_S)
    assert world.given_up is None


def test_a_refusal_to_start_anew_gives_up_at_once() -> None:
    for name in ("scheduler", "worker0", "copyengine"):
        world = served()
        world.die(name, KILLED)
        world.deliver_all()
        world.say(name, StartFailed("config", "no memory"))
        world.deliver_all()
        assert isinstance(world.given_up, PeerDied) and "no memory" in str(world.given_up)


def test_a_worker_that_cannot_be_taken_back_for_good_gives_up_at_once() -> None:
    world = served()
    world.die("worker0", KILLED)
    world.deliver_all()
    world.advance(world.living["worker0"])
    world.deliver_all()
    lost = PeerLost("worker0", world.living["worker0"].endpoint, "config", "another vocabulary")
    world.say("scheduler", lost)
    world.deliver_all()
    assert isinstance(world.given_up, PeerDied) and "another vocabulary" in str(world.given_up)


def test_a_worker_that_hangs_is_killed_and_its_death_has_the_reason() -> None:
    """By the scheduler's word, which is about one process alone: said of one that is gone, it means nothing."""
    world = served()
    old = world.living["worker0"]
    world.say("scheduler", PeerLost("worker0", "worker0:0", "peer_timeout", "late"))
    world.settle()
    assert world.living["worker0"] is old
    world.say("scheduler", PeerLost("worker0", old.endpoint, "peer_timeout", "a step took too long"))
    world.settle()
    world.check_serving()
    assert world.living["worker0"] is not old and world.said[0].startswith(
        "worker0 was killed by SIGKILL: a step took too long; starting worker0 anew"
    )


def test_who_does_not_answer_is_killed_and_its_death_has_the_reason() -> None:
    world = served()
    assert world.restarts.watched == [role.name for role in ROLES]
    world.die("worker1", KILLED)
    world.deliver_all()
    world.advance(world.living["worker1"])
    world.deliver_all()
    assert "worker1" not in world.restarts.watched, "it loads, for which it has the time of a start"
    world.settle()
    world._carry_out(world.restarts.silent("scheduler", 20))
    world.settle()
    world.check_serving()
    assert world.said[2].startswith("scheduler was killed by SIGKILL: it has answered nothing for 20 s")
    first = World()
    first.advance(first.living["copyengine"])
    first.deliver_all()
    first._carry_out(first.restarts.silent("copyengine", 20))
    assert isinstance(first.given_up, PeerTimeout) and "copyengine hangs" in str(first.given_up)


@pytest.mark.parametrize(("listens", "seconds"), [(False, PATIENCE.listen_s), (True, PATIENCE.serve_s)])
def test_a_restart_that_says_nothing_is_a_death(listens: bool, seconds: float) -> None:
    world = served()
    world.die("worker0", KILLED)
    world.deliver_all()
    silent = world.living["worker0"]
    if listens:
        world.advance(silent)
        world.deliver_all()
        world.wait(seconds - 1)
        world.say("scheduler", Progress("experts", 1, 2))  # renews the deadline
        world.deliver_all()
    world.wait(seconds - 1)
    assert world.living["worker0"] is silent
    world.wait(1)
    assert "worker0" not in world.living
    world.settle()
    world.check_serving()
    assert world.restarts.deaths.in_a_row == 2 and f"nothing was heard of worker0 for {seconds:g} s" in world.said[1]


def test_who_does_not_end_when_asked_is_killed() -> None:
    world = served()
    world.die("copyengine", KILLED)
    world.deliver_all()
    stubborn = [world.living["worker0"], world.living["worker1"]]
    assert all(process.ending for process in stubborn)
    world.wait(PATIENCE.end_s - 1)
    assert world.living["worker0"] is stubborn[0]
    world.wait(1)
    assert "worker0" not in world.living and "worker1" not in world.living
    world.settle()
    world.check_serving()


FIRST_START: list[tuple[str, Event | int | None, type[SlotstreamError], str]] = [
    ("worker0", StartFailed("config", "no such GPU"), ConfigError, "no such GPU"),
    ("scheduler", StartFailed("peer_timeout", "silence; raise it"), PeerTimeout, "silence; raise it"),
    ("copyengine", 7, PeerDied, "copyengine ended with exit code 7 while starting"),
    ("worker0", None, PeerTimeout, "nothing was heard of worker0 for 30 s"),
]


@pytest.mark.parametrize(("name", "what", "kind", "words"), FIRST_START)
def test_the_first_start_fails_as_a_whole(
    name: str, what: Event | int | None, kind: type[SlotstreamError], words: str
) -> None:
    world = World()
    while name not in world.living:
        for process in list(world.living.values()):
            world.advance(process)
        world.deliver_all()
    match what:
        case int(code):
            world.die(name, code)
        case None:
            world.wait(PATIENCE.listen_s)
        case event:
            world.say(name, event)
    world.deliver_all()
    assert type(world.given_up) is kind and str(world.given_up) == words
