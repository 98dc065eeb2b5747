"""The books of a soak: what clients saw, what the log says of each request, what the counters say. Pure.

All three have to agree exactly, but where a client left before it could know.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from scheduler.protocol import StatsReply
from tests.log_lines import events

End = Literal["ended", "error", "left", "lost"]
"""With its last reply; with an error or a refusal; the client left; the connection broke under it."""


@dataclass(frozen=True)
class Asked:
    """One request as its client saw it. `id` is empty if it never learned how the log calls it."""

    by: Literal["zmq", "http"]
    id: str
    end: End
    code: str = ""  # of an error; else the reason of an end, if it is known
    new_tokens: int = 0
    delivered: bool = True  # false if it may not even have been sent

    @property
    def refused_by_front(self) -> bool:
        """Then it may never have come to the scheduler."""
        return self.by == "http" and self.end == "error"


@dataclass(frozen=True)
class Line:
    """The log's line on one request."""

    id: str
    end: str
    prompt_tokens: int
    new_tokens: int

    @property
    def kind(self) -> str:
        """By which counter it is counted."""
        if self.end in ("stop", "length"):
            return "finished"
        if self.end in ("abort", "left"):
            return "aborted"
        return "refused" if self.end == "refused" else "failed"


def request_lines(log: Iterable[str]) -> list[Line]:
    """Those of all requests that came to the scheduler."""
    found = [line.fields for line in events(log, "request")]
    return [Line(of["id"], of["end"], int(of.get("prompt", 0)), int(of.get("new", 0))) for of in found]


def mistakes(asked: Sequence[Asked], lines: Sequence[Line], stats: StatsReply, kills: bool) -> list[str]:
    """Everything that does not add up, in words; nothing if all does.

    `stats` are of an engine at rest that has served nobody else. With `kills` connections may break.
    """
    return [*_by_request(asked, lines, kills), *_by_counter(asked, lines, stats)]


def _by_request(asked: Sequence[Asked], lines: Sequence[Line], kills: bool) -> list[str]:
    found: list[str] = []
    by_id: dict[str, list[Line]] = {}
    for line in lines:
        by_id.setdefault(line.id, []).append(line)
    found += [f"{len(of)} lines of request {name}" for name, of in by_id.items() if len(of) > 1]
    unnamed = sum(not one.id for one in asked)
    for one in asked:
        if not one.id:
            continue
        found += _of_one(one, next(iter(by_id.pop(one.id, ())), None))
        if one.end == "lost" and not kills:
            found.append(f"the connection of {one.id} broke: {one.code}")
    found += [f"the connection of a request broke: {one.code}" for one in asked if not one.id and one.end == "lost"]
    if kills:
        found = [text for text in found if "broke" not in text]
    if len(by_id) > unnamed:
        found.append(f"{len(by_id)} lines of requests that nobody asked, and {unnamed} that do not know their id")
    return found


def _of_one(one: Asked, line: Line | None) -> list[str]:
    if line is None:
        silent = one.refused_by_front or not one.delivered or one.end == "lost"
        return [] if silent else [f"no line of {one.id}, which was {one.end} {one.code}"]
    if one.end == "ended":
        same = line.new_tokens == one.new_tokens and (line.end == one.code if one.code else line.kind == "finished")
        told = f"{one.code}, {one.new_tokens} tokens"
        return [] if same else [f"{one.id} saw {told}, the log {line.end}, {line.new_tokens}"]
    if one.end == "error" and line.kind not in ("refused", "failed"):
        return [f"{one.id} saw the error {one.code}, the log {line.end}"]
    return []


def _by_counter(asked: Sequence[Asked], lines: Sequence[Line], stats: StatsReply) -> list[str]:
    found = []
    counted = Counter(line.kind for line in lines)
    for kind in ("finished", "failed", "aborted", "refused"):
        said = getattr(stats, kind)
        if said != counted[kind]:
            found.append(f"{kind}: {said} counted, {counted[kind]} in the log")
    prompt_tokens = sum(line.prompt_tokens for line in lines)
    if prompt_tokens != stats.prompt_tokens:
        found.append(f"prompt tokens: {stats.prompt_tokens} counted, {prompt_tokens} in the log")
    seen, drawn = sum(one.new_tokens for one in asked), sum(line.new_tokens for line in lines)
    if not seen <= stats.generated_tokens <= drawn:
        found.append(f"new tokens: {seen} seen by clients, {stats.generated_tokens} counted, {drawn} in the log")
    if stats.running or stats.waiting:
        found.append(f"{stats.running} requests run and {stats.waiting} wait after all have ended")
    if stats.kv_pages_free + stats.kv_pages_cached != stats.kv_pages_total:
        held = stats.kv_pages_total - stats.kv_pages_free - stats.kv_pages_cached
        found.append(f"{held} KV pages belong to nobody")
    return found
