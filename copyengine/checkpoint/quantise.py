"""Makes a checkpoint with quantised experts: `python -m copyengine.checkpoint.quantise SRC DST --format FORMAT`.

Everything but the experts stays as it is. A shard is there once it is complete, so that what was interrupted goes on
with the next one.
"""

import argparse
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout
from msgspec import Struct

from copyengine.checkpoint.directory import locate, read_config
from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.quantise_formats import FORMATS, dialects, scheme_of
from copyengine.checkpoint.quantise_plan import Shard, plan, spelt
from copyengine.checkpoint.quantise_shards import Errors, add_errors, make_shard
from copyengine.checkpoint.quantise_texts import write_texts
from copyengine.checkpoint.schemes import MODELOPT, Scheme
from copyengine.checkpoint.shard_file import file_nbytes, part_of
from copyengine.families import parse_spec
from copyengine.wire.errors import ConfigError
from copyengine.wire.logs import ERASE_LINE

SHARD_MB = 4000
PROGRESS_FILE = "quantise.json"
LOCK_FILE = ".quantise.lock"
BAR_S = 0.2
"""Between two drawings of it."""

BAR_COLUMNS = 40
STEADY_S = 2.0
"""After which what is left may be told from what is done."""


class Progress(Struct):
    """PROGRESS_FILE of a checkpoint that is being made, and that was: of what, and how far."""

    scheme: str
    shard_nbytes: int
    source: dict[str, tuple[int, int]]  # bytes and time of change, in ns, of each file of weights
    errors: dict[str, Errors] = {}  # of each shard that is complete


def quantise_checkpoint(
    source: Path, target: Path, scheme: Scheme = MODELOPT, shard_nbytes: int = SHARD_MB * 10**6, show: bool = False
) -> Errors:
    """Make `target` of `source`, or go on with it; the errors of the layers.

    `scheme` is one of quantise_formats. With `show` a bar on standard error says how far it is. ConfigError for a
    `source` that is no checkpoint, is quantised already or has no experts, for a `target` that is something else, and
    if the disk is full.
    """
    model = open_model(source)
    if model.spec.expert_format.name or model.linears:
        raise ConfigError(f"{source}: is already quantised ({model.spec.expert_format.name or 'outside the experts'})")
    if not model.experts:
        raise ConfigError(f"{source}: {model.spec.architecture} without experts has nothing to quantise")
    refs = locate(source)
    shards = plan(model, refs, scheme, shard_nbytes)
    files = {ref.path for ref in refs.values()}
    found = {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)}
    try:
        _claim(target, source)
        with FileLock(target / LOCK_FILE, timeout=0):
            progress = _progress(target, Progress(scheme.name, shard_nbytes, found), source)
            _make_shards(target, shards, scheme, progress, show)
            write_texts(target, source, scheme, refs, shards)
        (target / LOCK_FILE).unlink(missing_ok=True)
    except Timeout:
        raise ConfigError(f"{target}: another process is making it") from None
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written ({error.strerror or error}); shards that are complete are kept: make room "
            "and start it again"
        ) from None
    return _by_layer(progress)


def _claim(target: Path, source: Path) -> None:
    """`target` is a directory with nothing in it, or with what an earlier run left."""
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target}: is no directory; give one that is empty or does not exist")
    target.mkdir(parents=True, exist_ok=True)
    others = {path.name for path in target.iterdir()} - {LOCK_FILE, f".{PROGRESS_FILE}.part"}
    if others and PROGRESS_FILE not in others:
        raise ConfigError(f"{target}: holds something else ({min(others)}); give a directory that does not exist")


def _progress(target: Path, wanted: Progress, source: Path) -> Progress:
    """What is known of `target`, which is made as `wanted` says. ConfigError if it was begun otherwise."""
    path = target / PROGRESS_FILE
    if not path.exists():
        _write(path, msgspec.json.encode(wanted))
        return wanted
    try:
        begun = msgspec.json.decode(path.read_bytes(), type=Progress)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: is damaged ({error}); remove {target}") from None
    for key in ("scheme", "shard_nbytes", "source"):
        if getattr(begun, key) != getattr(wanted, key):
            what = f"another {key}" if key != "source" else f"other files than those of {source} now"
            raise ConfigError(f"{target}: was begun with {what}; remove it, or give another directory")
    return begun


def _make_shards(target: Path, shards: Sequence[Shard], scheme: Scheme, progress: Progress, show: bool) -> None:
    """Make those that are not complete. OSError if there is no room for them."""
    missing = [shard for shard in shards if not _is_complete(target, shard, progress)]
    for shard in missing:  # what a killed run left of it takes room that it will have
        for path in (target / shard.name, part_of(target / shard.name)):
            path.unlink(missing_ok=True)
    needed, free = sum(file_nbytes(shard.outputs) for shard in missing), shutil.disk_usage(target).free
    if needed > free:
        raise OSError(f"{needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free")
    bar = _Bar(sum(shard.read_nbytes for shard in missing), show)
    try:
        for shard in missing:
            progress.errors[shard.name] = make_shard(target, shard, scheme, bar.add)
            _write(target / PROGRESS_FILE, msgspec.json.encode(progress))
    finally:
        bar.end()


def _is_complete(target: Path, shard: Shard, progress: Progress) -> bool:
    path = target / shard.name
    return shard.name in progress.errors and path.exists() and path.stat().st_size == file_nbytes(shard.outputs)


def _write(path: Path, data: bytes) -> None:
    """The file `path`, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)


def _by_layer(progress: Progress) -> Errors:
    total: Errors = {}
    for errors in progress.errors.values():
        add_errors(total, errors)
    return dict(sorted(total.items()))


class _Bar:
    """How far it is: a live line on a terminal. Told by several threads."""

    def __init__(self, total_nbytes: int, show: bool) -> None:
        self._total = total_nbytes
        self._show = show and total_nbytes > 0
        self._done = 0
        self._start = self._shown = time.monotonic()
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """So many bytes more have been read."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if self._show and now - self._shown > BAR_S:
                self._shown = now
                self._draw(now - self._start)

    def end(self) -> None:
        """It is done, or has failed."""
        if self._show:
            sys.stderr.write(ERASE_LINE)

    def _draw(self, seconds: float) -> None:
        share = self._done / self._total
        filled = int(BAR_COLUMNS * share)
        left = f", {seconds / share - seconds:,.0f} s left" if share and seconds > STEADY_S else ""
        sys.stderr.write(
            f"{ERASE_LINE}[{'#' * filled}{'.' * (BAR_COLUMNS - filled)}] {share:4.0%}  {self._done / 1e6:,.0f} of "
            f"{self._total / 1e6:,.0f} MB{left}"
        )
        sys.stderr.flush()


def report(errors: Errors) -> str:
    """Each layer's error relative to its weights, root mean squares, and that of all."""
    lines = [f"layer {layer}: {_relative(*sums):.2%}" for layer, sums in errors.items()]
    whole = _relative(sum(error for error, _ in errors.values()), sum(squares for _, squares in errors.values()))
    return "\n".join(["relative RMS error of the experts", *lines, f"all: {whole:.2%}"])


def _relative(error: float, squares: float) -> float:
    return math.sqrt(error / squares) if squares else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m copyengine.checkpoint.quantise",
        description="Make a checkpoint with quantised experts. Started again, it goes on where it was interrupted.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="SRC", type=Path, help="directory of a bfloat16, float16 or float32 checkpoint"
    )
    parser.add_argument("target", metavar="DST", type=Path, help="directory to make")
    parser.add_argument(
        "--format", choices=tuple(FORMATS), required=True, help="of the experts; all else stays as it is"
    )
    parser.add_argument(
        "--dialect", help=f"whose files they are like: {dialects()}; the first that the model may have if not given"
    )
    parser.add_argument("--block", help="rows and columns that share a scale of fp8_block (default 128,128)")
    parser.add_argument("--shard-mb", type=int, default=SHARD_MB, help=f"size of a file at most (default {SHARD_MB})")
    stated = parser.parse_args(argv)
    try:
        if stated.shard_mb < 1:
            raise ConfigError(f"--shard-mb {stated.shard_mb}: must be at least 1")
        architecture = parse_spec(read_config(stated.source)).architecture
        scheme = scheme_of(stated.format, stated.dialect, stated.block, partial(spelt, architecture))
        shard_nbytes = stated.shard_mb * 10**6
        errors = quantise_checkpoint(stated.source, stated.target, scheme, shard_nbytes, sys.stderr.isatty())
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; shards that are complete are kept: start it again to go on\n")
        return 130
    sys.stdout.write(f"{report(errors)}\n{stated.target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
