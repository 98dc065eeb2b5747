"""`python -m scheduler.client`: one answer, or a small chat, on the terminal."""

import argparse
import asyncio
import io
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from copyengine.wire.errors import ConfigError, PeerDied, PeerTimeout, SlotstreamError
from copyengine.wire.lifecycle import EXIT_CONFIG
from copyengine.wire.loop import loop_factory
from copyengine.wire.standard_streams import open_closed_streams
from scheduler.client import DEFAULT_ENDPOINT, Answer, Client
from scheduler.json_grammar import json_of
from scheduler.protocol import Finished, Message, Sampling
from scheduler.validate import SEEDS

PROBE_S = 3.0
"""Seconds within which a running engine says that it is there."""

INTERRUPTED = 130


class NotServing(SlotstreamError):
    """There is no engine at the endpoint, or it takes no requests."""


class Screen:
    """Writes one answer after the other, as text or as one JSON object per event."""

    def __init__(self, out: TextIO, as_json: bool, choices: int = 1) -> None:
        """Of several `choices` the texts are written one below the other, once they are whole."""
        self._out = out
        self._json = as_json
        self._choices = choices

    async def show(self, answer: Answer) -> str:
        """Stream the answer and end with its figures; its text, the first if there are several."""
        texts: defaultdict[int, str] = defaultdict(str)
        try:
            async for piece in answer:
                texts[piece.index] += piece.text
                if self._json:
                    self._write(msgspec.json.encode(piece).decode() + "\n")
                elif self._choices == 1:
                    self._write(piece.text)
        except SlotstreamError:
            if texts[0] and not self._json and self._choices == 1:
                self._write("\n")  # the error is to stand on a line of its own
            raise
        if self._choices > 1 and not self._json:
            self._write("\n".join(f"[{i}] {texts[i]}" for i in range(self._choices)))
        if answer.finished:
            self._write(self._ending(answer.finished))
        return texts[0]

    def _ending(self, finished: Finished) -> str:
        return msgspec.json.encode(finished).decode() + "\n" if self._json else f"\n{figures(finished)}\n"

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def figures(finished: Finished) -> str:
    """The figures of one answer in one line."""
    usage, timing = finished.usage, finished.timing
    counts = Counter(choice.reason for choice in finished.choices)
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or finished.reason
    return (
        f"[{reasons}] {usage.prompt_tokens} prompt + {usage.new_tokens} new tokens, "
        f"{usage.cached_tokens} cached; "
        f"TTFT {timing.ttft_s:.3f} s, TPOT {timing.tpot_s * 1e3:.1f} ms; "
        f"chunks: {usage.demand_chunks} demand, {usage.streamed_chunks} streamed; "
        f"experts: {usage.expert_hits} hit, {usage.expert_misses} missed, {usage.copied_nbytes / 1e6:.1f} MB copied"
    )


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(
        prog="python -m scheduler.client",
        description="Ask a running engine. Without a prompt: a chat on a terminal, else the prompt is standard input.",
        allow_abbrev=False,
    )
    defaults = Sampling()
    flags.add_argument("prompt", nargs="?", help="text to continue")
    flags.add_argument("--endpoint", default=DEFAULT_ENDPOINT, help="where the engine listens (default %(default)s)")
    flags.add_argument("--max-tokens", type=int, help="new tokens at most (default: 256, or what fits if that is less)")
    flags.add_argument("--temperature", type=float, default=defaults.temperature, help="0 is greedy (default)")
    flags.add_argument(
        "--top-p", type=float, default=defaults.top_p, help="nucleus sampling (default %(default)s: off)"
    )
    flags.add_argument("--top-k", type=int, default=defaults.top_k, help="draw among the k likeliest (default 0: off)")
    flags.add_argument(
        "--min-p",
        type=float,
        default=defaults.min_p,
        help="leave out what is less likely than this share of the likeliest",
    )
    flags.add_argument("--seed", type=seed, help="makes a drawn answer repeatable; 0 to 2**63 - 1")
    _add_penalties(flags, defaults)
    flags.add_argument("--n", type=int, default=defaults.n, help="answers to one prompt, printed when all have ended")
    flags.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json: each token's log-probability and those of the N likeliest",
    )
    flags.add_argument("--stop", action="append", default=[], help="end before this text; may be given several times")
    flags.add_argument("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    flags.add_argument(
        "--json-schema",
        type=json_grammar,
        dest="grammar",
        metavar="FILE_OR_JSON",
        help="the answer is JSON of this schema, given as such or as a file that holds it",
    )
    flags.add_argument("--json", action="store_true", help="print one JSON object per event")
    flags.add_argument(
        "--event-loop", choices=["auto", "uvloop", "selector"], default="auto", help="asyncio event loop"
    )
    return flags


def _add_penalties(flags: argparse.ArgumentParser, defaults: Sampling) -> None:
    for name, effect in (
        ("repetition", "divides the logits of tokens of prompt and answer"),
        ("presence", "is taken off the logits of tokens of the answer"),
        ("frequency", "is taken off the logits of tokens of the answer for each time they occur"),
    ):
        default = getattr(defaults, f"{name}_penalty")
        help_text = f"{effect} (default {default}: off)"
        flags.add_argument(f"--{name}-penalty", type=float, default=default, metavar="P", help=help_text)
    flags.add_argument(
        "--logit-bias",
        action="append",
        type=token_bias,
        default=[],
        metavar="ID=VALUE",
        help="is added to the logit of a token id, -100 to 100; may be given several times",
    )


def token_bias(text: str) -> tuple[int, float]:
    """`ID=VALUE`. ArgumentTypeError if it is not."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes ID=VALUE, such as 5=-2.5, not {text!r}") from None


def json_grammar(text: str) -> str:
    """The grammar of the answers that match a schema, which may say how blanks stand (`x-guidance`).

    ArgumentTypeError if there is no JSON object.
    """
    try:
        schema = text if text.lstrip().startswith("{") else Path(text).read_text("utf-8")
        parsed = msgspec.json.decode(schema, type=dict)
        return f"start: {f'%json {json.dumps(parsed)}' if 'x-guidance' in parsed else json_of(parsed)}"
    except (OSError, ValueError) as error:  # also of a file that is not UTF-8, and of JSON that is none
        raise argparse.ArgumentTypeError(f"no JSON schema can be read from {text[:100]!r}: {error}") from None


def seed(text: str) -> int:
    """A seed; what is too large for a message can be refused here alone. ArgumentTypeError if it is none."""
    value = int(text) if text.lstrip("-").isdecimal() else -1
    if not 0 <= value < SEEDS:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number in [0, 2**63)")
    return value


def sampling_of(stated: argparse.Namespace) -> Sampling:
    """The sampling that the flags state."""
    fields: dict[str, Any] = {name: getattr(stated, name, None) for name in Sampling.__struct_fields__}
    fields |= {"stop_token_ids": [], "logit_bias": dict(stated.logit_bias), "grammar": stated.grammar or ""}
    return Sampling(**fields)


class Session:
    """One client and the event loop it lives on, which runs only while something is asked."""

    def __init__(self, runner: asyncio.Runner, endpoint: str, screen: Screen, sampling: Sampling) -> None:
        self._runner = runner
        self._client = Client(endpoint)
        self._screen = screen
        self._sampling = sampling

    def open(self) -> None:
        """Connect. ConfigError if the endpoint is none, NotServing if no engine there takes requests."""
        self._runner.run(self._open())

    def close(self) -> None:
        """Abort what still runs and disconnect. No-op if `open` could not connect."""
        self._runner.run(self._client.__aexit__(None, None, None))

    def answer(self, prompt: str) -> None:
        """Answer a plain prompt."""
        self._runner.run(self._screen.show(self._client.generate(prompt=prompt, sampling=self._sampling)))

    def chat(self) -> None:
        """Read turns until /exit or the end of input. Ctrl-C ends the answer, not the chat."""
        messages: list[Message] = []
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                continue
            if line == "/exit":
                return
            if line:
                messages.append(Message("user", line))
                self._take_turn(messages)

    def _take_turn(self, messages: list[Message]) -> None:
        """Answer the last message; a turn that fails or is interrupted is forgotten."""
        try:
            answer = self._client.generate(messages=messages, sampling=self._sampling)
            messages.append(Message("assistant", self._runner.run(self._screen.show(answer))))
        except KeyboardInterrupt:
            sys.stdout.write("\n[interrupted: this turn is forgotten]\n")
            self._runner.run(self._client.settle())
            messages.pop()
        except (PeerDied, PeerTimeout):
            raise
        except SlotstreamError as error:
            sys.stdout.write(f"error: {error}\n")
            messages.pop()

    async def _open(self) -> None:
        await self._client.__aenter__()
        try:
            health = await self._client.health(PROBE_S)
        except (PeerDied, PeerTimeout):
            endpoint = self._client.endpoint
            raise NotServing(f"no engine answers at {endpoint}: start one with `python launch.py`") from None
        if not health.ready:
            raise NotServing(f"the engine at {self._client.endpoint} takes no requests now: it is {health.phase}")


def run(stated: argparse.Namespace) -> None:
    """Answer or chat as the flags say. ConfigError for one that would be of no use; OSError if the output cannot be
    written."""
    if stated.logprobs is not None and not stated.json:
        raise ConfigError("--logprobs needs --json: text has no place for them")
    if stated.n > 1 and stated.prompt is None and sys.stdin.isatty():
        raise ConfigError("--n needs a prompt: a chat goes on from one answer")
    if isinstance(sys.stdout, io.TextIOWrapper):
        encoding = "utf-8" if stated.json else None  # else a terminal's own, which shows what it can
        sys.stdout.reconfigure(encoding=encoding, errors="replace")
    sampling = sampling_of(stated)
    screen = Screen(sys.stdout, stated.json, sampling.n)
    if isinstance(sys.stdin, io.TextIOWrapper):  # as in the command line; what is not UTF-8 is refused as a prompt
        encoding = None if sys.stdin.isatty() else "utf-8"  # a file's, where the system's default is another one too
        sys.stdin.reconfigure(encoding=encoding, errors="surrogateescape")
    with asyncio.Runner(loop_factory=loop_factory(stated.event_loop)) as runner:
        session = Session(runner, stated.endpoint, screen, sampling)
        try:
            session.open()
            if stated.prompt is not None:
                session.answer(stated.prompt)
            elif sys.stdin.isatty():
                session.chat()
            else:
                session.answer(sys.stdin.read())
        finally:
            session.close()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    open_closed_streams()
    try:
        run(parser().parse_args(argv))
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_CONFIG
    except SlotstreamError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the answer has had enough
        return _without_output(0)
    except OSError as error:
        sys.stderr.write(f"error: the answer cannot be written: {error}\n")
        return _without_output(1)
    return 0


def _without_output(code: int) -> int:
    """`code`; the interpreter's last flush of what could not be written goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
