"""Errors against themselves: what travels as (code, detail) arrives as the same class."""

import pytest

from copyengine.wire.errors import (
    ConfigError,
    CopyFailed,
    PeerDied,
    PeerTimeout,
    RequestRefused,
    SlotstreamError,
    WireError,
    code_of,
    from_code,
)


@pytest.mark.parametrize("kind", [ConfigError, CopyFailed, PeerDied, PeerTimeout, WireError])
def test_classes_round_trip(kind: type[SlotstreamError]) -> None:
    again = from_code(code_of(kind("why")), "why")
    assert type(again) is kind and str(again) == "why"


def test_refusals_keep_their_code_and_detail() -> None:
    again = from_code(code_of(RequestRefused("queue_full", "256 wait")), "256 wait")
    assert isinstance(again, RequestRefused) and (again.code, again.detail) == ("queue_full", "256 wait")


def test_every_class_of_the_tree_has_a_code_or_is_abstract() -> None:
    """A class added without a code would travel as "internal" and come back as a refusal."""
    kinds = {SlotstreamError}
    while more := {sub for kind in kinds for sub in kind.__subclasses__()} - kinds:
        kinds |= more
    ours = {kind for kind in kinds if kind.__module__ == "copyengine.wire.errors" and kind is not RequestRefused}
    assert {kind.__name__ for kind in ours if code_of(kind("")) == "internal"} == {"SlotstreamError", "PeerError"}
