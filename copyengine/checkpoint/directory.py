"""A checkpoint directory: its config.json and which file holds which tensor."""

import json
from pathlib import Path

import msgspec
from msgspec import Struct

from copyengine.checkpoint.header import TensorRef, read_header
from copyengine.checkpoint.keys import Keys
from copyengine.wire.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class _Index(Struct):
    weight_map: dict[str, str]


def read_config(directory: Path, hf_overrides: str = "{}") -> Keys:
    """config.json of `directory` with the JSON object `hf_overrides` merged over it, objects key by key."""
    if not directory.is_dir():
        raise ConfigError(f"model {directory}: no such directory; give the directory that holds config.json")
    path = directory / "config.json"
    config = _json_object(_read_text(path, "the directory is no checkpoint without it"), str(path))
    return _merge(config, _json_object(hf_overrides, "--hf-overrides"))


def locate(directory: Path) -> dict[str, TensorRef]:
    """Every tensor of the checkpoint by its name in the files. ConfigError if a file is absent or damaged."""
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    if not (directory / INDEX).exists():
        others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f"; {others[0]} is there: convert it to safetensors" if others else "; download the weights"
        raise ConfigError(f"{directory}: neither {SINGLE} nor {INDEX} is there{hint}")
    weight_map = _weight_map(directory / INDEX)
    shards = {name: read_header(_shard_path(directory, name)) for name in sorted(set(weight_map.values()))}
    refs: dict[str, TensorRef] = {}
    for tensor, shard in weight_map.items():
        ref = shards[shard].get(tensor)
        if ref is None:
            raise ConfigError(f"{directory / INDEX}: names tensor {tensor} in {shard}, which does not hold it")
        refs[tensor] = ref
    return refs


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = msgspec.json.decode(_read_text(path, "download it again"), type=_Index).weight_map
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: malformed index ({error}); download it again") from None
    for tensor, shard in weight_map.items():
        # Names of other directories, drives and devices are refused on every platform alike.
        if not shard.endswith(".safetensors") or any(c in shard for c in "/\\:\0"):
            raise ConfigError(f"{path}: {tensor} is said to be in {shard!r}: not a plain .safetensors file name")
    return weight_map


def _shard_path(directory: Path, shard: str) -> Path:
    path = directory / shard
    if not path.is_file():
        raise ConfigError(f"{path}: this shard is missing ({INDEX} names it); download it again")
    return path


def _read_text(path: Path, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; {hint}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error.reason}); download it again") from None


def _json_object(text: str, source: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: must be a JSON object, not {type(value).__name__}")
    return value


def _merge(base: Keys, over: Keys) -> Keys:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
