"""Text files that do harm, against the refusal that names them: each in the process that is made for it."""

import base64
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from copyengine.wire.errors import ConfigError
from scheduler import text_trial
from scheduler.template_limits import RENDER_S
from scheduler.text_trial import TextTrial
from tests.scheduler.rig import CORPUS, train_tokenizer


def charsmap(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def several(kind: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


def added(number: int, text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, "special": True, **flags}


TENFOLD = [replace({"String": "a"}, "a" * 10)] * 9
SLOW = several("normalizers", *[replace({"String": "a"}, "a")] * 100_000)

HARMFUL: list[tuple[dict[str, Any], str]] = [
    ({"normalizer": charsmap(b"")}, r"tokenizer\.json: cannot be read: Precompiled"),
    ({"normalizer": charsmap(b"\xff" * 4)}, r"tokenizer\.json: cannot be read|end the process"),  # wants 4 GB
    ({"normalizer": charsmap(b"\4\0\0\0" + b"\xff" * 4 + b"abc")}, r"fails over its normalizer: index out of bounds"),
    ({"normalizer": replace({"Regex": "q"}, "a" * 1000)}, r"its normalizer makes 1,000 characters of 0"),
    ({"normalizer": several("normalizers", replace({"Regex": "q"}, "r" * 50), replace({"Regex": "r"}, "s" * 60))},
     r"its normalizer makes [\d,]+ characters of"),
    ({"decoder": replace({"String": "a"}, "a" * 100)}, r"its decoder makes 100 characters of 1"),
    ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "fails over it: chunk size must be non-zero"),
    ({"decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}}, r"token \d+ cannot be decoded"),
    ({"added_tokens": [added(5000 + i, chr(0x10000 + i) * i) for i in range(300)]}, "llguidance fails over it: asser"),
]  # fmt: skip


def write(directory: Path, **parts: Any) -> Path:
    """A tokenizer as it should be, but for `parts`."""
    tokenizer = json.loads(train_tokenizer(CORPUS).to_str()) | parts
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (directory / "config.json").write_text('{"vocab_size": 400}', "utf-8")
    return directory


def tried(directory: Path) -> None:
    with TextTrial(directory, "{}") as trial:
        trial.passed()


@pytest.mark.parametrize(("parts", "named"), HARMFUL, ids=range(len(HARMFUL)))
def test_what_does_harm_is_refused_by_name(tmp_path: Path, parts: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        tried(write(tmp_path, **parts))
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize("parts", [
    {"normalizer": several("normalizers", *TENFOLD)}, {"decoder": several("decoders", *TENFOLD)},
])  # fmt: skip
def test_what_takes_all_memory_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any]) -> None:
    """A thousand million characters of one."""
    monkeypatch.setattr(text_trial, "TRIAL_NBYTES", 300 * 2**20)
    with pytest.raises(ConfigError, match=r"take more than 314,572,800 bytes of memory to be read and tried"):
        tried(write(tmp_path, **parts))


def test_what_takes_all_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_trial, "TRIAL_S", 2.0)
    with pytest.raises(ConfigError, match=r"take more than 2 s to be read and tried"):
        tried(write(tmp_path, normalizer=SLOW))


def test_the_trial_ends_itself_in_the_middle_of_a_librarys_call(tmp_path: Path) -> None:
    """With nobody who ends it: its standard input stays open."""
    write(tmp_path, normalizer=SLOW)
    code = "import sys; from scheduler import text_trial as t; t.TRIAL_S = 2.0; sys.exit(t.main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, str(tmp_path), "{}"]
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(argv, stdin=pipe, stdout=null, stderr=pipe) as trial:
        assert trial.stderr is not None
        assert b"Timeout" in trial.stderr.read()
        assert trial.wait(60) == 1


def test_the_trial_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """Against a template over which it would go on for RENDER_S."""
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "config.json").write_text("{}", "utf-8")
    (tmp_path / "chat_template.jinja").write_text(loops, "utf-8")
    code = (
        "import pathlib, sys; from scheduler.text_trial import TextTrial\n"
        "with TextTrial(pathlib.Path(sys.argv[1]), '{}') as t: print(t._process.pid, flush=True); t.passed()"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        trial = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    psutil.wait_procs([trial], timeout=RENDER_S - 1)
    assert not trial.is_running() or trial.status() == psutil.STATUS_ZOMBIE


def test_a_long_reason_is_cut_before_it_is_written(tmp_path: Path) -> None:
    """Against a pipe of 64 KiB that nobody reads until the process has ended."""
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        tried(write(tmp_path, added_tokens=[added(5000, "x"), "y" * 200_000]))
    assert len(str(refused.value)) <= text_trial.MAX_REASON_NBYTES


def test_what_is_as_it_should_be_passes(tmp_path: Path) -> None:
    """A regular expression that goes back over some texts for ever refuses those (as a request's), not the start."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tried(write(tmp_path))
    tried(write(tmp_path, pre_tokenizer=split))


def test_a_template_that_takes_too_much_over_a_short_chat_is_refused(tmp_path: Path) -> None:
    """Against the rendering's own bounds; one that objects to a chat is not."""
    doubling = "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}", "utf-8")
    tried(write(tmp_path))
    (tmp_path / "chat_template.jinja").write_text(doubling, "utf-8")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: the chat template takes too much over a chat of 1 "):
        tried(tmp_path)


def test_nothing_is_tried_where_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", "utf-8")
    trial = TextTrial(tmp_path, "{}")
    trial.passed()
    assert trial._process is None


def test_a_trial_that_nobody_waits_for_is_ended(tmp_path: Path) -> None:
    """As where the checkpoint is refused meanwhile."""
    began_s = time.monotonic()
    with TextTrial(write(tmp_path, normalizer=several("normalizers", *TENFOLD)), "{}") as trial:
        process = trial._process
    assert process is not None and process.returncode and time.monotonic() - began_s < text_trial.TRIAL_S
