"""Typed access to the keys of a config.json: every refusal names the key, its value and what it must be.

A key that is null counts as not stated, as in transformers.
"""

from collections.abc import Mapping

from copyengine.wire.errors import ConfigError

Keys = Mapping[str, object]
"""A config.json, or an object inside one."""


def show(value: object) -> str:
    """`value` for a message: short, and never failing."""
    if isinstance(value, int) and abs(value) > 1 << 64:
        return "(a huge integer)"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"({type(value).__name__})"
    return text if len(text) <= 80 else text[:77] + "..."


def wrong(key: str, value: object, reason: str) -> ConfigError:
    """The refusal of one key."""
    return ConfigError(f"config.json: {key} is {show(value)}: {reason}")


def stated(keys: Keys, *names: str) -> str | None:
    """Which of a key's spellings is stated (not null). ConfigError if two are and differ."""
    found = [name for name in names if keys.get(name) is not None]
    for other in found[1:]:
        if keys[other] != keys[found[0]]:
            raise wrong(other, keys[other], f"contradicts {found[0]} ({show(keys[found[0]])}): state one of them")
    return found[0] if found else None


def integer(keys: Keys, *names: str, low: int = 1, high: int = 2**31 - 1, default: int | None = None) -> int:
    """The integer under one of `names`, from `low` to `high`. ConfigError if it is absent and has no default."""
    name = stated(keys, *names)
    if name is None:
        if default is None:
            raise ConfigError(f"config.json: {names[0]} is missing; add it as an integer of at least {low}")
        return default
    value = keys[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise wrong(name, value, f"must be an integer from {low} to {high}")
    return value


def integers(keys: Keys, name: str) -> list[int]:
    """The list of integers under `name`; empty if absent."""
    value = keys.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or any(not isinstance(item, int) or isinstance(item, bool) for item in value):
        raise wrong(name, value, "must be a list of integers")
    return value


def number(keys: Keys, name: str, low: float = 0.0, high: float = 1e30, default: float | None = None) -> float:
    """The finite number under `name`, from `low` to `high`. ConfigError if it is absent and has no default."""
    value = keys.get(name)
    if value is None:
        if default is None:
            raise ConfigError(f"config.json: {name} is missing; add it as a number of at least {low:g}")
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise wrong(name, value, f"must be a number from {low:g} to {high:g}")
    return float(value)


def flag(keys: Keys, name: str, default: bool = False) -> bool:
    """The boolean under `name`."""
    value = keys.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong(name, value, "must be true or false")
    return value


def nested(keys: Keys, name: str) -> Keys:
    """The object under `name`; empty if absent."""
    value = keys.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(name, value, "must be an object")
    return value
