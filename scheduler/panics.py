"""Panics of the libraries written in Rust (tokenizers, llguidance): a fault in their own code, raised as an error that
is no Exception, so that it would pass every handler and leave whoever waits without an answer."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NAME = "PanicException"
"""Each such library has a class of its own by that name, which none of them lets us import."""

MAX_REASON_CHARS = 300
"""Of what a library says as it panics: it may quote the text, which would come back whole."""


class Panic(Exception):
    """A library failed in its own code; what it says of that."""


def caught(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `call` returns or raises, but Panic where that is a panic."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        if not is_panic(error):
            raise
        raise Panic(reason(error)) from None


def is_panic(error: BaseException) -> bool:
    """Whether it is one."""
    return type(error).__name__ == NAME


def reason(error: BaseException) -> str:
    """What it says: it may quote a whole file."""
    return str(error)[:MAX_REASON_CHARS]
