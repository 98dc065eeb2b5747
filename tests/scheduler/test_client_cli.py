"""The client command as a process of its own, against a scheduler with made-up workers.

What it prints is checked against the tokenizer's one-shot decoding and against what the worker was sent.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from copyengine.wire.lifecycle import EXIT_CONFIG
from scheduler.client_cli import figures, parser, sampling_of
from scheduler.protocol import Finished, Sampling, Timing, Usage
from tests.scheduler.rig import engine, expected, on_loop

COMMAND = [sys.executable, "-m", "scheduler.client"]


async def ask(endpoint: str, *flags: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    argv = [*COMMAND, "--endpoint", endpoint, *flags]
    return await asyncio.to_thread(
        subprocess.run, argv, input=stdin, capture_output=True, text=True, timeout=60, encoding="utf-8"
    )


def wanted(model: Path, prompt: str, count: int) -> str:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = expected(tokenizer.encode(prompt).ids, count, tokenizer.get_vocab_size())
    return str(tokenizer.decode(ids))


def test_a_prompt_streams_its_text_and_ends_with_a_line_of_figures(model: Path, event_loop: str) -> None:
    async def main() -> None:
        async with engine(model) as rig:
            flags = ["--max-tokens", "9", "--ignore-eos", "--event-loop", event_loop]
            for done in (
                await ask(rig.endpoint, "a fox", *flags),
                await ask(rig.endpoint, *flags, stdin="a fox"),
            ):
                assert (done.returncode, done.stderr) == (0, "")
                text, line, rest = done.stdout.rsplit("\n", 2)
                assert text == wanted(model, "a fox", 9)
                assert "9 new tokens" in line and "chunks: 1 demand, 0 streamed" in line
                assert rest == ""

    on_loop(event_loop, main)


@pytest.mark.parametrize(("output", "code"), [("pipe", 0), ("/dev/full", 1)])
def test_output_that_cannot_be_written_ends_quietly(model: Path, output: str, code: int) -> None:
    """A reader that has had enough, and a full disk."""
    if output == "/dev/full" and not Path(output).exists():
        pytest.skip("needs /dev/full")

    async def main() -> None:
        async with engine(model) as rig:
            argv = [*COMMAND, "a fox", "--endpoint", rig.endpoint, "--max-tokens", "50", "--ignore-eos"]
            out: Any = asyncio.subprocess.PIPE if output == "pipe" else open(output, "wb")  # noqa: ASYNC230, SIM115
            process = await asyncio.create_subprocess_exec(*argv, stdout=out, stderr=asyncio.subprocess.PIPE)
            if output == "pipe":
                process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
            else:
                out.close()
            stderr = (await process.communicate())[1].decode()
            assert process.returncode == code and "Traceback" not in stderr
            assert stderr.count("error: ") == code

    on_loop("selector", main)


def test_json_is_one_object_per_event(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as rig:
            done = await ask(rig.endpoint, "a fox", "--json", "--max-tokens", "5", "--ignore-eos", "--stop", "zzz")
            *pieces, last = [json.loads(line) for line in done.stdout.splitlines()]
            assert {piece["type"] for piece in pieces} == {"Tokens"}
            assert "".join(piece["text"] for piece in pieces) == wanted(model, "a fox", 5)
            assert (last["type"], last["reason"], last["usage"]["new_tokens"]) == ("Finished", "length", 5)

    on_loop("selector", main)


def test_no_engine_is_one_clear_line_within_seconds() -> None:
    start_s = time.monotonic()
    done = subprocess.run(
        [*COMMAND, "--endpoint", "tcp://127.0.0.1:9", "hi"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: no engine answers at tcp://127.0.0.1:9")
    assert done.stderr.count("\n") == 1
    assert time.monotonic() - start_s < 20


def test_a_refused_request_is_one_line(model: Path) -> None:
    async def main() -> None:
        async with engine(model) as rig:
            done = await ask(rig.endpoint, "a fox", "--top-p", "7")
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == "error: invalid_request: top_p 7.0 must be in (0, 1]\n"

    on_loop("selector", main)


@pytest.mark.parametrize(
    ("flags", "stdin"),
    [
        (["a fox", "--max-tokens", "100000000000000000000"], None),
        ([os.fsdecode(b"a \xff fox")], None),
        (["a fox", "--stop", os.fsdecode(b"\xff")], None),
        ([], b"a \xff fox"),
    ],
)
def test_what_cannot_be_sent_is_one_line(model: Path, flags: list[str], stdin: bytes | None) -> None:
    """An int over 64 bits, and bytes that are no UTF-8."""

    async def main() -> None:
        async with engine(model) as rig:
            argv = [*COMMAND, "--endpoint", rig.endpoint, *flags]
            done = await asyncio.to_thread(subprocess.run, argv, input=stdin, capture_output=True, timeout=60)
            assert (done.returncode, done.stdout) == (1, b"")
            assert done.stderr.startswith(b"error: invalid_request: the request cannot be encoded")
            assert done.stderr.count(b"\n") == 1
            async with rig.client() as client:
                stats = await client.stats()
                assert (stats.aborted, stats.dropped_frames) == (0, 0)

    on_loop("selector", main)


@pytest.mark.parametrize("endpoint", ["foo", "localhost:5757", os.fsdecode(b"\xff")])
def test_an_endpoint_that_is_none_is_refused_by_name(endpoint: str) -> None:
    done = subprocess.run([*COMMAND, "--endpoint", endpoint, "hi"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (EXIT_CONFIG, "")
    assert done.stderr.startswith(f"error: cannot connect to the engine at {endpoint!r}")
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_chat_on_a_terminal_survives_an_interrupted_answer(model: Path, event_loop: str) -> None:
    import pty

    def chat(endpoint: str) -> tuple[str, str, int]:
        terminal, inner = pty.openpty()
        argv = [*COMMAND, "--endpoint", endpoint, "--max-tokens", "3000", "--ignore-eos", "--event-loop", event_loop]
        with subprocess.Popen(argv, stdin=inner, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            os.close(inner)
            os.write(terminal, b"hello\n")
            assert process.stdout is not None and process.stderr is not None
            seen = process.stdout.read(40)
            process.send_signal(signal.SIGINT)
            os.write(terminal, b"again\n")
            while b"[interrupted" not in seen:
                seen += process.stdout.read(1)
            before = len(seen)
            seen += process.stdout.read(40)
            process.send_signal(signal.SIGINT)
            os.write(terminal, b"/exit\n")
            seen += process.stdout.read()
            os.close(terminal)
            return seen[before:].decode(errors="replace"), process.stderr.read().decode(), process.wait(10)

    async def main() -> None:
        async with engine(model) as rig:
            rig.worker.step_s = 0.005
            after, errors, code = await asyncio.to_thread(chat, rig.endpoint)
            assert (errors, code) == ("", 0)
            assert "[interrupted: this turn is forgotten]" in after
            await rig.settled()
            async with rig.client() as client:
                assert (await client.stats()).aborted == 2
            prompts = [s.tokens for step in rig.worker.steps for s in step.sequences if s.start == 0]
            tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
            texts = [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in prompts]
            assert texts == ["<|user|>hello", "<|user|>again"], "an interrupted turn is forgotten"

    on_loop(event_loop, main)


@pytest.mark.parametrize(
    ("flags", "sampling"),
    [
        ([], Sampling()),
        (
            ["--max-tokens=3", "--temperature=.5", "--top-p=.9", "--top-k=4", "--seed=5", "--stop=a", "--stop=b"],
            Sampling(0.5, 0.9, 4, 5, 3, ["a", "b"]),
        ),
        (["--ignore-eos"], Sampling(ignore_eos=True)),
        (
            ["--min-p=.1", "--repetition-penalty=1.2", "--presence-penalty=.3", "--frequency-penalty=-.4", "--n=2"],
            Sampling(min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=-0.4, n=2),
        ),
        (
            ["--logit-bias=5=-1.5", "--logit-bias=7=2", "--logprobs=0"],
            Sampling(logit_bias={5: -1.5, 7: 2.0}, logprobs=0),
        ),
    ],
)
def test_flags_state_the_sampling(flags: list[str], sampling: Sampling) -> None:
    assert sampling_of(parser().parse_args(flags)) == sampling


def test_a_schema_is_given_as_such_or_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type":\n "integer"}', "utf-8")
    for text in (str(path), ' {"type": "integer"}'):
        stated = parser().parse_args([f"--json-schema={text}"])
        grammar = sampling_of(stated).grammar.removeprefix("start: %json ")
        assert json.loads(grammar) == {"type": "integer", "x-guidance": {"whitespace_pattern": "[ \\n\\t]{1,16}"}}
    path.write_text("[1]", "utf-8")
    for text in (str(path), str(tmp_path / "none"), '{"type": }', ""):
        with pytest.raises(SystemExit):
            parser().parse_args([f"--json-schema={text}"])
        assert f"no JSON schema can be read from {text!r}: " in capsys.readouterr().err


@pytest.mark.parametrize("bias", ["5", "a=1", "5=", "5=x"])
def test_a_bias_that_is_none_is_refused(bias: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([f"--logit-bias={bias}"])
    assert f"takes ID=VALUE, such as 5=-2.5, not '{bias}'" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", str(2**63), "1" * 30, "x", ""])
def test_a_seed_that_is_none_is_refused(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([f"--seed={seed}"])
    assert f"{seed} must be a whole number in [0, 2**63)" in capsys.readouterr().err


def test_several_answers_come_one_below_the_other_and_as_json_by_index(model: Path) -> None:
    """Against the tokenizer's one-shot decoding."""

    async def main() -> None:
        async with engine(model) as rig:
            flags = ["a fox", "--n", "2", "--max-tokens", "9", "--ignore-eos"]
            text = wanted(model, "a fox", 9)
            done = await ask(rig.endpoint, *flags)
            assert done.stdout.startswith(f"[0] {text}\n[1] {text}\n[2 length] ")
            done = await ask(rig.endpoint, *flags, "--json", "--logprobs", "1")
            *pieces, last = [json.loads(line) for line in done.stdout.splitlines()]
            for index in range(2):
                mine = [piece for piece in pieces if piece["index"] == index]
                assert "".join(piece["text"] for piece in mine) == text
                assert sum(len(piece["logprobs"]) for piece in mine) == 9
            assert [choice["reason"] for choice in last["choices"]] == ["length"] * 2

    on_loop("selector", main)


def test_log_probabilities_without_json_are_refused() -> None:
    """They would be shown nowhere."""
    done = subprocess.run([*COMMAND, "hi", "--logprobs", "3"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (EXIT_CONFIG, "")
    assert done.stderr == "error: --logprobs needs --json: text has no place for them\n"


def test_the_line_of_figures() -> None:
    finished = Finished("length", Usage(7, 32, 0, 1, 2, 30, 40, 5000), Timing(0.1, 0.25, 0.0123, 1.0))
    assert figures(finished) == (
        "[length] 7 prompt + 32 new tokens, 0 cached; TTFT 0.250 s, TPOT 12.3 ms; "
        "chunks: 1 demand, 2 streamed; experts: 30 hit, 40 missed, 0.0 MB copied"
    )
