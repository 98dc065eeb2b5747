"""What a template may take: time, and memory. A template is somebody else's program, and one line of it could ask for
more of either than there is.

Each rendering has an allowance. Whatever the template makes is charged to it, what an operation would make of little is
reckoned before it is done, and the time is looked at whenever something is charged.
"""

import re
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from jinja2.runtime import LoopContext
from jinja2.utils import Cycler, Joiner, Namespace

RENDER_S = 10.0
"""Seconds that a chat may take to become text: a sixth of what text may take to become tokens."""

MAX_RENDERED = 512 * 2**20
"""That a rendering may make, all of its intermediate texts together: characters, and ELEMENT for each element of a
list. A message's text usually passes ten operations; a request has some millions of characters."""

MAX_WALKED = 2_000_000
"""Elements that one operation may look at, of lists in lists all: a second's work."""

ELEMENT = 64
"""What an element of a list counts for: the object with it takes about as many bytes."""

MAX_REPEATED = 1_000_000
"""What `*` may repeat a sequence to: one operation holds up the whole process."""

MAX_POWER_BITS = 65_536
"""What `**` and `*` may raise an integer to, for the same reason."""

WIDTH = re.compile(r"\d+")
NESTED = re.compile(r"\{[^{}]*\{")
MAX_DIGITS = 7
"""Of a width in a format string; what has more is too large in any case."""

PADDED = ("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "batch", "slice", "tojson", "round")
"""Methods and filters that take a number on which the size of their result depends."""

WALKED = (
    *("string", "tojson", "pprint", "join", "escape", "e", "forceescape", "xmlattr", "urlencode"),
    *("sort", "unique", "sum", "groupby", "min", "max", "dictsort", "index", "count"),
)
"""Those that look at all that is in a list, and at all that is in that: a list that has another one twice, and so on,
is larger than memory."""

DRAINED = ("join", "sum", "sort", "unique", "groupby", "min", "max", "urlencode")
"""Of those, which go through an iterator: it is made a list before, since nothing can be reckoned of it."""

TEXTUAL = ("replace", "center", "format", "upper", "lower", "capitalize", "title", "trim", "striptags", "urlize")
"""Filters that make a text of whatever they are given."""

SPLIT = ("list", "split", "rsplit", "splitlines", "sort", "unique", "reverse", "batch", "slice")
"""Those that make elements of a text's characters."""

SLOW = ("urlize", "striptags", "wordwrap")
MAX_SLOW_CHARS = 100_000
"""Of a text for those whose time may grow with its square."""


class Allowance:
    """Of one rendering."""

    def __init__(self) -> None:
        self._left = MAX_RENDERED
        self._end_s = time.monotonic() + RENDER_S

    def charge(self, size: int) -> None:
        """So much is made. OverflowError if that is more than is left, TimeoutError if the time is over."""
        self._left -= size
        if self._left < 0:
            raise OverflowError(f"it makes more than {MAX_RENDERED:,} characters on the way")
        if time.monotonic() > self._end_s:
            raise TimeoutError(f"it takes more than {RENDER_S:g} s")

    def expect(self, size: int) -> None:
        """The next operation makes so much. Raises as `charge` does, without charging."""
        self.charge(size)
        self._left += size

    def made(self, value: Any) -> Any:
        """`value`, charged."""
        self.charge(_size(value))
        return value

    def drained(self, value: Any) -> Any:
        """The list of an iterator's elements, charged one by one; any other value is returned as it is."""
        if not isinstance(value, Iterator):
            return value
        elements = []
        for one in value:
            self.charge(ELEMENT)
            elements.append(one)
        return elements

    def spelt(self, value: Any) -> int:
        """Characters that `value` takes as text, about. Raises as `expect` does if that is more than is left."""
        total, walked, todo = 0, 0, [value]
        while todo:
            one = todo.pop()
            if isinstance(one, Namespace):
                one = object.__getattribute__(one, "_Namespace__attrs")
            elif isinstance(one, Cycler | Joiner | LoopContext):  # `attribute=` reaches what they hold
                one = vars(one)
            if isinstance(one, str | bytes):
                total += len(one)
                continue
            total += 8
            if isinstance(one, Mapping):
                todo += [*one.keys(), *one.values()]
            elif isinstance(one, Sequence | KeysView | ValuesView | ItemsView | set | frozenset):
                todo += one
            walked += 1
            if walked + len(todo) > MAX_WALKED:
                raise OverflowError(f"it looks at more than {MAX_WALKED:,} elements of lists at once")
        self.expect(total)
        return total

    def expect_power(self, left: Any, right: Any) -> None:
        """Before `left ** right`."""
        bits = left.bit_length() * right if isinstance(left, int) and isinstance(right, int) else 0
        if bits > MAX_POWER_BITS:
            raise OverflowError(f"** makes an integer of more than {MAX_POWER_BITS} bits")

    def expect_product(self, left: Any, right: Any) -> None:
        """Before `left * right`."""
        times, repeated = (left, right) if isinstance(left, int) else (right, left)
        if not isinstance(times, int):
            return
        if isinstance(repeated, int) and times.bit_length() + repeated.bit_length() > MAX_POWER_BITS:
            raise OverflowError(f"* makes an integer of more than {MAX_POWER_BITS} bits")
        if isinstance(repeated, Sequence) and times * len(repeated) > MAX_REPEATED:
            raise OverflowError(f"* makes a sequence of more than {MAX_REPEATED:,} elements")

    def expect_format(self, form: str | bytes, values: Any) -> None:
        """Before the values, or some of them, stand in `form`, which is of `%` or of `str.format`."""
        text = form if isinstance(form, str) else form.decode("latin-1")
        widths = WIDTH.findall(text)
        stated_elsewhere = "*" in text or NESTED.search(text)
        if any(len(width) > MAX_DIGITS for width in widths) or (stated_elsewhere and _largest(values) > MAX_REPEATED):
            raise OverflowError(f"a format asks for more than {MAX_REPEATED:,} characters")
        places = text.count("%") + text.count("{")
        self.expect(len(text) + sum(map(int, widths)) + places * (self.spelt(values) + 8))

    def expect_call(self, name: str, value: Any, arguments: Sequence[Any]) -> None:
        """Before the method or filter `name` of `value`."""
        if name in PADDED:
            self._expect_padding(name, value, arguments)
        if name in WALKED:
            size = self.spelt(value) + self.spelt(list(arguments))
            again = name in ("join", "sum") and hasattr(value, "__len__")  # for each element
            self.expect(size + len(value) * (self.spelt(list(arguments)) if name == "join" else 1) if again else size)
        if isinstance(value, str | bytes):
            self._expect_of_text(name, value, arguments)

    def _expect_padding(self, name: str, value: Any, arguments: Sequence[Any]) -> None:
        widest = max([_largest(arguments), *(len(one) for one in arguments if isinstance(one, str))])
        if widest > MAX_REPEATED:
            raise OverflowError(f"{name} is asked for more than {MAX_REPEATED:,}")
        if widest > ELEMENT:
            lines = value.count("\n") + value.count("\t") if isinstance(value, str) else self.spelt(value) // 4
            self.expect(widest * (1 + lines))

    def _expect_of_text(self, name: str, text: Any, arguments: Sequence[Any]) -> None:
        if name in SLOW and len(text) > MAX_SLOW_CHARS:
            raise OverflowError(f"{name} is given more than {MAX_SLOW_CHARS:,} characters")
        if name in SPLIT:
            self.expect(ELEMENT * len(text))
        match name, arguments:
            case "replace", [old, new, *_] if isinstance(old, type(text)) and isinstance(new, type(text)):
                self.expect(text.count(old) * len(new))
            case "replace", [old, new, *_]:
                self.expect((len(text) + 1) * self.spelt(new))
            case "join", [parts]:
                self.expect(self.spelt(parts) + len(text) * (len(parts) if hasattr(parts, "__len__") else 0))
            case "format" | "format_map", _:
                self.expect_format(text, arguments)
            case "translate", [table]:
                self.expect(len(text) * self.spelt(table))


class _Added:
    """What `sum` begins with where that is a list: each addition copies all that is there, so each is charged."""

    def __init__(self, value: Any, run: Allowance) -> None:
        self.value = value
        self._run = run

    def __add__(self, other: Any) -> "_Added":
        self._run.expect(ELEMENT * (len(self.value) + (len(other) if hasattr(other, "__len__") else 0)))
        value = self.value + other
        self._run.charge(len(value))
        return _Added(value, self._run)


def limited(name: str, function: Callable[..., Any], allowance: Callable[[], Allowance], skipped: int) -> Any:
    """The filter `function`, within the allowance; `skipped` arguments are before the value, of jinja2's own."""

    def call(*arguments: Any, **options: Any) -> Any:
        before, (value, *given) = arguments[:skipped], arguments[skipped:]
        run = allowance()
        if name in DRAINED:
            value = run.drained(value)
        if name in TEXTUAL and not isinstance(value, str):
            run.spelt(value)
            value = value if hasattr(value, "__html__") else run.made(str(value))
        run.expect_call(name, value, [*given, *options.values()])
        if name == "sum":
            given = [_added(one, run) for one in given]
            options = {key: _added(one, run) for key, one in options.items()}
        result = function(*before, value, *given, **options)
        return run.made(result.value if isinstance(result, _Added) else result)

    call.__dict__.update(getattr(function, "__dict__", {}))  # how jinja2 marks what is to be given the context
    return call


def _added(value: Any, run: Allowance) -> Any:
    return _Added(value, run) if isinstance(value, list | tuple) else value


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return ELEMENT * len(value) if isinstance(value, list | tuple | dict | set) else 1


def _largest(values: Any) -> int:
    """The largest integer among `values`, or in those of them that are mappings."""
    several = (
        values.values() if isinstance(values, Mapping) else values if isinstance(values, list | tuple) else [values]
    )
    return max(
        (_largest(one) if isinstance(one, Mapping) else one for one in several if isinstance(one, int | Mapping)),
        default=0,
    )
