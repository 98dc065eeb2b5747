"""Who is started, ended and started anew, and when it is given up: rest_for_one, as values. Pure.

```text
down ──Start──> starting ──Listening──> listening ──Ready, Joined──> serving
 ^                 └─────────────────────────┴───────────┬──────────────┘
 │                                  Stop: what it needs has died
 └───────────────────Exited─────────────────────────── ending
```
An end that nobody asked for is a death: the dead is started anew, and with it all that need it, after a pause that
grows with the deaths in a row (deaths.py).
"""

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from copyengine.wire.child import Exited, Said
from copyengine.wire.deaths import DeathCount, how_it_ended
from copyengine.wire.errors import ConfigError, PeerDied, PeerTimeout, SlotstreamError, from_code
from copyengine.wire.lifecycle import EXIT_PEER, Joined, Listening, Peer, PeerLost, Progress, Ready, StartFailed

DRAIN_TIMEOUT_S = 60.0
"""Seconds running requests may take to finish after SIGTERM, unless --drain-timeout-s says so: what supervisors of
services grant before they kill is of that order. What runs then ends with an error, and the exit code is 1."""


class Role(Struct, frozen=True):
    """One process of the run.

    It is started once all that it `needs`, `uses` and `calls` listen, with their endpoints. It falls with each that it
    needs; when one that it uses is started anew, it is told of the new endpoint. Until it is Ready it takes no such
    word and may wait in vain for one that is dead: so long it falls with what it uses, too, which is no death of its
    own. One that it calls comes back where it was, and neither is told of the other.

    Who `takes_requests` is asked to finish them when the run is to end. What is `spare` is started anew for ever, and
    its deaths are counted apart: the run is of use to others without it, who would lose what they have for nothing.
    """

    name: str
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    takes_requests: bool = False
    spare: bool = False


class Patience(Struct, frozen=True):
    """Seconds until something is given up. `serve_s` begins anew with every Progress, and is set by flag `knob`. Who
    serves has `answer_s` to say that it is alive; 0: for ever. Running requests have `drain_s` to finish in a drain."""

    listen_s: float
    serve_s: float
    end_s: float
    knob: str
    answer_s: float = 0.0
    drain_s: float = DRAIN_TIMEOUT_S


class Start(Struct, frozen=True):
    """Start `name` with these endpoints of what it needs and uses."""

    name: str
    endpoints: dict[str, str]


class Stop(Struct, frozen=True):
    """Ask `name` to end."""

    name: str


class Kill(Struct, frozen=True):
    """End `name` the hard way."""

    name: str


class Introduce(Struct, frozen=True):
    """Tell `name` that `peer` was started anew."""

    name: str
    peer: Peer


class Say(Struct, frozen=True):
    """A line for people, in the log under the name of `event`."""

    event: str
    text: str


class GiveUp(Struct, frozen=True):
    """End it all, because of `error`."""

    error: SlotstreamError


Action = Start | Stop | Kill | Introduce | Say | GiveUp
Phase = Literal["down", "starting", "listening", "serving", "ending"]


class _Place:
    """Where the process of one role stands."""

    def __init__(self, role: Role, deaths: DeathCount) -> None:
        self.role = role
        self.phase: Phase = "down"
        self.endpoint = ""  # while it listens or serves
        self.due_s = math.inf
        self.rest_until_s = -math.inf  # before which it is not started anew
        self.deaths = deaths  # that end the run's patience with it
        self.last_word = ""  # what it, or one that works with it, said is wrong
        self.introduced: set[str] = set()  # who has to say Joined: they ran before it listened

    @property
    def runs(self) -> bool:
        return self.phase in ("starting", "listening", "serving")

    def enter(self, phase: Phase, due_s: float = math.inf) -> None:
        self.phase, self.due_s = phase, due_s
        if phase in ("down", "starting", "ending"):
            self.endpoint = ""
        if phase == "starting":
            self.last_word = ""


class Restarts:
    """Takes what is heard of the processes, and the time; says what is to be done."""

    def __init__(self, roles: Sequence[Role], patience: Patience) -> None:
        """`roles` in their order: each after those it needs, uses and calls."""
        self.deaths = DeathCount()
        self._patience = patience
        self._places = {role.name: _Place(role, DeathCount(most=None) if role.spare else self.deaths) for role in roles}
        self._began = False  # all have served at some time
        self._broken_s: float | None = None  # since when not all serve, after they did

    @property
    def serving(self) -> bool:
        """Whether all serve."""
        return all(place.phase == "serving" for place in self._places.values())

    def phase(self, name: str) -> Phase:
        """Where `name` stands."""
        return self._places[name].phase

    def endpoint(self, name: str) -> str:
        """Where `name` listens; empty if it does not."""
        return self._places[name].endpoint

    @property
    def takers(self) -> list[str]:
        """Who takes requests now."""
        places = self._places.values()
        return [place.role.name for place in places if place.role.takes_requests and place.phase == "serving"]

    @property
    def watched(self) -> list[str]:
        """Who should answer at any time. Those that start are given the time that `Patience` says."""
        return [place.role.name for place in self._places.values() if place.phase == "serving"]

    def begin(self, now_s: float) -> list[Action]:
        """The first start."""
        return self._start_possible(now_s)

    def take(self, notice: Said | Exited, now_s: float) -> list[Action]:
        """Something was heard of a process."""
        place = self._places[notice.name]
        match notice:
            case Exited(code=code):
                return self._ended(place, code, now_s)
            case Said(event=Listening(endpoint=endpoint)) if place.phase == "starting":
                return self._listens(place, endpoint, now_s)
            case Said(event=Ready()) if place.phase == "listening":
                return self._ready(place, now_s)
            case Said(event=Progress()):
                for waiting in self._places.values():
                    if waiting.phase == "listening":
                        waiting.due_s = now_s + self._patience.serve_s
            case Said(event=Joined(peer=peer, endpoint=endpoint)) if self._is_at(peer, endpoint):
                return self._serves(self._places[peer], place.role.name, now_s)
            case Said(event=PeerLost() as lost) if self._is_at(lost.peer, lost.endpoint):
                return self._lost(self._places[lost.peer], lost.code, lost.detail)
            case Said(event=StartFailed(code=code, detail=detail)) if place.runs:
                return self._failed(place, code, detail)
        return []

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed."""
        actions: list[Action] = []
        for place in self._places.values():
            if now_s < place.due_s:
                continue
            if place.phase != "ending":
                seconds = self._patience.listen_s if place.phase == "starting" else self._patience.serve_s
                knob = self._patience.knob if place.phase == "listening" else ""
                more = f"; raise {knob} if the machine is only slow" if knob else ""
                place.last_word = f"nothing was heard of {place.role.name} for {seconds:g} s{more}"
                if not self._began:
                    return [GiveUp(PeerTimeout(place.last_word))]
            place.due_s = math.inf
            actions.append(Kill(place.role.name))
        return actions + self._start_possible(now_s)

    def silent(self, name: str, seconds: float) -> list[Action]:
        """`name` serves, and has not answered for `seconds`: its process is stopped, or hangs."""
        place = self._places[name]
        place.last_word = f"it has answered nothing for {seconds:g} s (--watchdog-s)"
        if not self._began:
            return [GiveUp(PeerTimeout(f"{name} hangs: {place.last_word}"))]
        return [Kill(name)]

    def _is_at(self, name: str, endpoint: str) -> bool:
        """Whether the process of that name that runs now is the one at `endpoint`; what is said of others is late."""
        place = self._places.get(name)
        return place is not None and place.runs and place.endpoint == endpoint

    def _start_possible(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for place in self._places.values():
            role = place.role
            endpoints = {name: self._places[name].endpoint for name in (*role.needs, *role.uses, *role.calls)}
            if place.phase == "down" and now_s >= place.rest_until_s and all(endpoints.values()):
                place.enter("starting", now_s + self._patience.listen_s)
                for used in role.uses:
                    self._places[used].introduced.discard(role.name)
                actions.append(Start(role.name, endpoints))
        return actions

    def _listens(self, place: _Place, endpoint: str, now_s: float) -> list[Action]:
        place.enter("listening", now_s + self._patience.serve_s)
        place.endpoint = endpoint
        name = place.role.name
        users = [other.role.name for other in self._users(name) if other.runs]
        place.introduced.update(users)
        introductions: list[Action] = [Introduce(user, Peer(name, endpoint)) for user in users]
        return introductions + self._start_possible(now_s)

    def _ready(self, place: _Place, now_s: float) -> list[Action]:
        """Who is used by another one serves once that one works with it."""
        name = place.role.name
        if self._users(name):
            return []
        for used in place.role.uses:
            if self._places[used].phase == "listening" and name not in self._places[used].introduced:
                self._places[used].enter("serving")
        return self._serves(place, name, now_s)

    def _serves(self, place: _Place, by: str, now_s: float) -> list[Action]:
        place.introduced.discard(by)
        place.enter("serving")
        if all(other.phase == "serving" for other in self._places.values() if other.deaths is place.deaths):
            place.deaths.served(now_s)
        if not self.serving:
            return []
        broken_s, self._broken_s, self._began = self._broken_s, None, True
        return [] if broken_s is None else [Say("serving_again", f"serving again after {now_s - broken_s:.1f} s")]

    def _users(self, name: str) -> list[_Place]:
        return [place for place in self._places.values() if name in place.role.uses]

    def _lost(self, place: _Place, code: str, detail: str) -> list[Action]:
        """Another one cannot work with it: it is of no use, whatever it does."""
        if code == "config":
            return [GiveUp(PeerDied(f"{place.role.name} cannot be taken back: {detail}"))]
        place.last_word = place.last_word or detail  # what it said itself names the cause
        return [Kill(place.role.name)]

    def _failed(self, place: _Place, code: str, detail: str) -> list[Action]:
        place.last_word = detail
        error = from_code(code, detail)
        if not self._began:
            return [GiveUp(error)]
        if isinstance(error, ConfigError) and not place.role.spare:
            return [GiveUp(PeerDied(f"{place.role.name} cannot be started anew: {detail}"))]
        return []

    def _ended(self, place: _Place, code: int, now_s: float) -> list[Action]:
        asked, name = place.phase == "ending", place.role.name
        place.enter("down")
        if asked:
            return self._start_possible(now_s)
        cause = f"{name} {how_it_ended(code)}"
        if not self._began:
            return [GiveUp(PeerDied(f"{cause} while starting"))]
        if place.last_word:
            cause = f"{cause}: {place.last_word}"
        if code == EXIT_PEER and place.role.needs:
            return self._blame([self._places[need] for need in place.role.needs], cause)
        return self._died(place, cause, now_s)

    def _blame(self, needs: list[_Place], cause: str) -> list[Action]:
        """Something ended for want of `needs`. Their end, which may be under way unheard, is the death that counts."""
        actions: list[Action] = []
        for need in needs:
            if need.runs:
                need.endpoint = ""  # nothing is started with it any more
                need.last_word = need.last_word or f"launch kills it if it still runs, because {cause}"
                actions.append(Kill(need.role.name))
        return actions

    def _died(self, place: _Place, cause: str, now_s: float) -> list[Action]:
        """All that need it end too, and then all start anew."""
        deaths = place.deaths
        deaths.died(cause, now_s)
        if deaths.too_many:
            return [GiveUp(PeerDied(deaths.summary))]
        if self._broken_s is None:
            self._broken_s = now_s
        place.rest_until_s = now_s + deaths.pause_s
        fallen = self._fallen(place)
        actions: list[Action] = []
        for other in fallen:
            if other.runs:
                other.enter("ending", now_s + self._patience.end_s)
                actions.append(Stop(other.role.name))
        anew = ", ".join(other.role.name for other in (place, *fallen))
        say = Say("death", f"{cause}; starting {anew} anew ({deaths.ordinal})")
        return [say, *actions, *self._start_possible(now_s)]

    def _fallen(self, dead: _Place) -> list[_Place]:
        """All that need it, or use it and are not ready, or do so with one of these.

        The order of roles has each after those it needs and uses.
        """
        names = {dead.role.name}
        fallen = []
        for place in self._places.values():
            begins = place.phase in ("starting", "listening")
            if names.intersection(place.role.needs) or (begins and names.intersection(place.role.uses)):
                names.add(place.role.name)
                fallen.append(place)
        return fallen
