"""The built-in model: random weights, made on the first start and kept in the user's cache directory.

`python -m copyengine.checkpoint.builtin` makes it if need be and prints its directory.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout
from msgspec import Struct
from safetensors import SafetensorError

from copyengine.checkpoint.random_model import write_random_model
from copyengine.wire.errors import ConfigError

VERSION = 1
"""Raised whenever the files that are made change."""

NAME = f"builtin-qwen3-moe-v{VERSION}"
NEEDED_NBYTES = 115_000_000
"""Free bytes asked for before building; the files take 106.1 MB."""

LOCK_TIMEOUT_S = 120.0
"""Seconds to wait for another process that is making the model, which takes one or two, on a busy disk more. When they
are over the start is refused with the lock's path: its owner hangs."""

MANIFEST = "manifest.json"


class FileDigest(Struct, frozen=True):
    """What a file of the built-in model must be."""

    nbytes: int
    sha256: str


class Manifest(Struct, frozen=True):
    """Every file but the manifest itself, by name."""

    files: dict[str, FileDigest]


def cache_directory() -> Path:
    """The platform's cache directory of this program: LOCALAPPDATA, ~/Library/Caches, or XDG_CACHE_HOME or ~/.cache.

    ConfigError if the user has no home directory and no variable says where.
    """
    try:
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "slotstream" / "cache"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "slotstream"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slotstream"
    except RuntimeError as error:  # what Path.home raises
        raise ConfigError(
            f"no cache directory for the built-in model ({error}); set {_cache_variable()}, or give --model"
        ) from None


def ensure_builtin(cache_dir: Path | None = None, on_progress: Callable[[int], None] | None = None) -> Path:
    """The directory of the built-in model, made if it is absent or damaged.

    `on_progress` is called with the bytes of each tensor made. Several processes may call this at once. ConfigError,
    naming the cache directory, if it cannot be written or the disk is full.
    """
    cache = cache_dir or cache_directory()
    target = cache / NAME
    if is_intact(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{NAME}.lock", timeout=LOCK_TIMEOUT_S):
            if not is_intact(target):
                _build(cache, target, on_progress)
    except (OSError, SafetensorError, Timeout) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cache directory {cache}: the built-in model cannot be written ({why}); free {NEEDED_NBYTES // 10**6} MB "
            f"there, or point {_cache_variable()} at a writable directory, or give --model a checkpoint of your own"
        ) from None
    return target


def _build(cache: Path, target: Path, on_progress: Callable[[int], None] | None) -> None:
    """Make the model in a directory beside `target` and rename it. The caller holds the lock, so that any other such
    directory was left by a process that died."""
    for left in cache.glob(f".{NAME}.build-*"):
        shutil.rmtree(left)
    if target.exists():
        shutil.rmtree(target)
    free = shutil.disk_usage(cache).free
    if free < NEEDED_NBYTES:
        raise OSError(f"{free // 10**6} MB are free")
    build = Path(tempfile.mkdtemp(prefix=f".{NAME}.build-", dir=cache))
    try:
        write_random_model(build, progress=on_progress)
        _write_manifest(build)
        os.rename(build, target)
    finally:
        shutil.rmtree(build, ignore_errors=True)


def is_intact(directory: Path) -> bool:
    """Every file of the manifest is there with its size and SHA-256."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Manifest)
        sizes_match = "config.json" in manifest.files and all(
            (directory / n).stat().st_size == d.nbytes for n, d in manifest.files.items()
        )
        return sizes_match and all(_sha256(directory / n) == d.sha256 for n, d in manifest.files.items())
    except (OSError, ValueError):  # malformed JSON, or a name that no file can have
        return False


def _write_manifest(directory: Path) -> None:
    files = {p.name: FileDigest(p.stat().st_size, _sha256(p)) for p in sorted(directory.iterdir())}
    (directory / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(Manifest(files)), indent=2))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cache_variable() -> str:
    return "LOCALAPPDATA" if sys.platform == "win32" else "HOME" if sys.platform == "darwin" else "XDG_CACHE_HOME"


def main() -> None:
    """Print the directory of the built-in model."""
    try:
        print(ensure_builtin())  # noqa: T201
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
