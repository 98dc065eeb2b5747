"""Flags against the Structs they come from: round trips, and refusals that name flag and value."""

from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from copyengine.config import CopyEngineConfig
from copyengine.wire.cli import parse, parser_for, to_argv
from copyengine.wire.errors import ConfigError


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """A config of every kind of field.

    Not shown in the help.
    """

    model: str
    name: Annotated[str, Meta(description="a name; 100 % text")] = ""
    slots: Annotated[Literal["auto"] | Annotated[int, Meta(ge=1)], Meta(description="how many")] = "auto"
    slots_more: Annotated[int, Meta(ge=0, le=9, extra_json_schema={"aliases": ["--old-name", "-m"]})] = 3
    seconds: Annotated[float, Meta(gt=0)] = 1.5
    level: Literal["low", "high"] = "low"
    verbose: bool = False


texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
configs = st.builds(
    Config,
    texts,
    texts,
    st.one_of(st.just("auto"), st.integers(1, 10**9)),
    st.integers(0, 9),
    st.floats(0.001, 1e9),
    st.sampled_from(["low", "high"]),
    st.booleans(),
)


@given(configs)
def test_round_trip(config: Config) -> None:
    """Whatever the text: with blanks, dashes, equal signs, empty."""
    assert parse(Config, to_argv(config), "x") == config


def test_defaults_are_the_structs() -> None:
    assert parse(CopyEngineConfig, [], "x") == CopyEngineConfig()
    assert to_argv(CopyEngineConfig()) == []
    assert to_argv(CopyEngineConfig(run_id="r", parent_pipe=True)) == ["--run-id=r", "--parent-pipe"]


@pytest.mark.parametrize("flag", ["--slots-more", "--old-name", "-m"])
def test_aliases(flag: str) -> None:
    assert parse(Config, ["--model", "m", flag, "7"], "x").slots_more == 7


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--slots", "0"], "--slots 0"),
        (["--slots", "some"], "--slots some"),
        (["--slots", "4", "--slots-more", "10"], "--slots-more 10"),
        (["--old-name", "-1"], "--slots-more -1"),
        (["--seconds", "0"], "--seconds 0"),
        (["--seconds", "soon"], "--seconds soon"),
        (["--level", "middle"], "--level middle"),
        (["--slot", "4"], "--slot"),
        (["--unknown"], "--unknown"),
        (["--name"], "--name"),
        (["--verbose=1"], "--verbose"),
        (["more"], "more"),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], named: str) -> None:
    """Also where one flag's name begins like another's, and abbreviations are not guessed."""
    with pytest.raises(ConfigError) as refused:
        parse(Config, ["--model", "m", *argv], "x")
    assert named in str(refused.value)


def test_a_required_flag_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="--model"):
        parse(Config, [], "x")


def test_help_shows_every_flag_with_its_description_and_default() -> None:
    text = " ".join(parser_for(Config, "x").format_help().split())
    for part in ("A config of every kind of field.", "--slots auto|N", "how many (default auto)", "100 % text", "-m N"):
        assert part in text
    assert "Not shown" not in text and "(default )" not in text


def test_what_is_no_text_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"--name .*UTF-8"):
        parse(Config, ["--model", "m", "--name", "a\udcff"], "p")
    assert parse(Config, ["--model", "m", "--name", "ä\nß"], "p").name == "ä\nß"


def test_a_flag_that_is_no_text_is_refused_in_words_that_can_be_sent() -> None:
    """As `python -m scheduler` tells its parent: by JSON."""
    with pytest.raises(ConfigError, match=r"unrecognized arguments: --x\\udcc5") as refused:
        parse(Config, ["--model", "a", "--x\udcc5"], "x")
    str(refused.value).encode()
