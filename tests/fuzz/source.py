"""Bytes as a source of decisions: which sample is taken, and what of it is changed."""

import copy
import json
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

MOST_CHANGES = 4

NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 16, 127, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "a",
        "a" * 300,
        "\0",
        "\ud800",
        "../x",
        "/etc/passwd",
        "NUL",
        "é\u0301🦊",
        "1",
        "null",
        "__class__",
        "*",
    ),
    *([], {}, [[]], [None], {"": None}, {"type": "x"}, {"a": {"a": {"a": []}}}, [0] * 40, ["a", 1, None]),
]


class Source:
    """`data`, from its beginning; zeros after its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        value = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return value

    def below(self, bound: int) -> int:
        return (self.byte() << 8 | self.byte()) % bound if bound > 256 else self.byte() % bound

    def pick(self, several: Sequence[T]) -> T:
        return several[self.below(len(several))]

    def chunk(self) -> bytes:
        """Up to 63 bytes, its own length before it."""
        length = self.byte() % 64
        taken = self._data[self._at : self._at + length]
        self._at += length
        return taken

    def rest(self) -> bytes:
        taken, self._at = self._data[self._at :], max(self._at, len(self._data))
        return taken

    def nasty(self) -> Any:
        """A value that a reader may not expect."""
        return self.chunk().decode("utf-8", "replace") if self.byte() < 32 else copy.deepcopy(self.pick(NASTY))


def changed(source: Source, value: Any) -> Any:
    """A copy of a tree of lists and dicts in which a few things are others."""
    root = [copy.deepcopy(value)]
    for _ in range((source.byte() + 1) % (MOST_CHANGES + 1)):
        _change(source, root)
    return root[0]


def _change(source: Source, root: list[Any]) -> None:
    places = list(_places(root))
    holder, key = source.pick(places)
    other_holder, other_key = source.pick(places)
    match source.byte() % 8:
        case 0 if holder is not root:
            del holder[key]
        case 1 if isinstance(holder, list) and holder is not root:
            holder.append(copy.deepcopy(holder[key]))
        case 2 if isinstance(holder, dict):
            holder[str(source.nasty())] = holder[key]
        case 3:
            holder[key] = copy.deepcopy(other_holder[other_key])
        case 4 | 5 if isinstance(holder[key], int | float):
            holder[key] = holder[key] + source.pick((-1, 1, 8, -8, 255, 0.5))
        case 6:
            holder[key] = [holder[key]]
        case _:
            holder[key] = source.nasty()


def _places(root: Any) -> Any:
    todo = [root]
    while todo:
        holder = todo.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            if isinstance(holder[key], dict | list):
                todo.append(holder[key])


def as_json(source: Source, value: Any) -> bytes:
    """As JSON; now and then not quite."""
    text = json.dumps(value, ensure_ascii=bool(source.byte() & 1)).encode("utf-8", "surrogatepass")
    return damaged(source, text) if source.byte() < 24 else text


def damaged(source: Source, data: bytes) -> bytes:
    """`data`, cut short, with a byte changed, or with something put in."""
    at = source.below(len(data) + 1)
    match source.byte() % 4:
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([source.byte()]) + data[at + 1 :]
        case 2:
            return data[:at] + source.chunk() + data[at:]
        case _:
            return data[:at] + data[at // 2 :]
