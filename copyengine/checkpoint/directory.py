"""A checkpoint directory: its config.json and which file holds which tensor."""

import json
import stat
from pathlib import Path

import msgspec
from msgspec import Struct

from copyengine.checkpoint.header import TensorRef, read_header
from copyengine.checkpoint.keys import Keys
from copyengine.checkpoint.overrides import overridden, strangers
from copyengine.wire.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

HF_QUANT_CONFIG = "hf_quant_config.json"
"""What ModelOpt writes of a quantised model; newer ones of its exports say the same in config.json."""

MAX_TEXT_NBYTES = 100_000_000
"""A text file beyond this is taken for damaged."""

MAX_OBJECT_CHARS = 10_000_000
"""Settings beyond this are taken for damaged: what is made of them takes 26 times as much (99 MB of empty lists
took 2.6 GB), and the largest, with a quantisation for each of many linears, have some millions."""


class _Index(Struct):
    weight_map: dict[str, str]


def read_config(directory: Path, hf_overrides: str = "{}") -> Keys:
    """config.json of `directory` with the JSON object `hf_overrides` merged over it, as `overridden` says.

    What ModelOpt's own file says is its quantization_config if it has none, and beside it under the file's name.
    """
    if not stat.S_ISDIR(_mode(directory)):
        raise ConfigError(f"model {directory}: no such directory; give the directory that holds config.json")
    path = directory / "config.json"
    text = read_text(path)
    if text is None:
        raise ConfigError(f"{path}: no such file; the directory is no checkpoint without it")
    try:
        config = _with_modelopt(json_object(text, str(path)), directory / HF_QUANT_CONFIG)
        return overridden(config, json_object(hf_overrides, "--hf-overrides"))
    except RecursionError:
        raise ConfigError(f"{path} and --hf-overrides: nested too deeply") from None


def unknown_overrides(directory: Path, hf_overrides: str) -> list[str]:
    """The keys of `hf_overrides` that config.json of `directory` does not have: slips, perhaps. Errors as above."""
    return list(strangers(read_config(directory), json_object(hf_overrides, "--hf-overrides")))


def _with_modelopt(config: dict[str, object], path: Path) -> dict[str, object]:
    text = read_text(path)
    if text is None:
        return config
    stated = {"quant_method": "modelopt", **json_object(text, str(path))}
    if config.get("quantization_config") is None:
        return {**config, "quantization_config": stated}
    return {**config, HF_QUANT_CONFIG: stated}


def locate(directory: Path) -> dict[str, TensorRef]:
    """Every tensor of the checkpoint by its name in the files. ConfigError if a file is absent or damaged."""
    if _mode(directory / SINGLE):
        return read_header(_regular(directory / SINGLE))
    index = read_text(directory / INDEX)
    if index is None:
        raise ConfigError(f"{directory}: neither {SINGLE} nor {INDEX} is there{_hint(directory)}")
    weight_map = _weight_map(directory / INDEX, index)
    shards = {name: read_header(_shard_path(directory, name)) for name in sorted(set(weight_map.values()))}
    refs: dict[str, TensorRef] = {}
    for tensor, shard in weight_map.items():
        ref = shards[shard].get(tensor)
        if ref is None:
            raise ConfigError(f"{directory / INDEX}: names tensor {tensor} in {shard}, which does not hold it")
        refs[tensor] = ref
    return refs


def read_text(path: Path) -> str | None:
    """The UTF-8 text of the file `path`; None if there is none. ConfigError, naming it, if it cannot be read."""
    if not _mode(path):
        return None
    try:
        with open(_regular(path), "rb") as file:
            data = file.read(MAX_TEXT_NBYTES + 1)
        if len(data) > MAX_TEXT_NBYTES:
            raise ConfigError(f"{path}: larger than {MAX_TEXT_NBYTES:,} bytes; download it again")
        return data.decode()
    except OSError as error:
        raise _unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason}); download it again") from None


def json_object(text: str, source: str) -> dict[str, object]:
    """The JSON object in `text`. ConfigError, naming `source`, if it is none, or too large."""
    if len(text) > MAX_OBJECT_CHARS:
        raise ConfigError(f"{source}: larger than {MAX_OBJECT_CHARS:,} characters; download it again")
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate can neither be tokenised nor sent
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: must be a JSON object, not {type(value).__name__}")
    return value


def _regular(path: Path) -> Path:
    """`path`, which is a file: opening a pipe or a device might never return. ConfigError otherwise."""
    if not stat.S_ISREG(_mode(path)):
        raise ConfigError(f"{path}: cannot be read (not a regular file)")
    return path


def _mode(path: Path) -> int:
    """The type and permission bits of what is at `path`; 0 for nothing. ConfigError if that cannot be told."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError | ValueError) -> ConfigError:
    return ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")


def _hint(directory: Path) -> str:
    """What to do about weights that are not there."""
    try:
        others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
    except OSError as error:
        raise _unreadable(directory, error) from None
    return f"; {others[0]} is there: convert it to safetensors" if others else "; download the weights"


def _weight_map(path: Path, text: str) -> dict[str, str]:
    try:
        weight_map = msgspec.json.decode(text, type=_Index).weight_map
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: malformed index ({error}); download it again") from None
    for tensor, shard in weight_map.items():
        # Names of other directories, drives and devices are refused on every platform alike.
        if not shard.endswith(".safetensors") or any(c in shard for c in "/\\:\0"):
            raise ConfigError(f"{path}: {tensor} is said to be in {shard!r}: not a plain .safetensors file name")
    return weight_map


def _shard_path(directory: Path, shard: str) -> Path:
    path = directory / shard
    if not _mode(path):
        raise ConfigError(f"{path}: this shard is missing ({INDEX} names it); download it again")
    return _regular(path)
