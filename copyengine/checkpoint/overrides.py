"""What --hf-overrides change of a config.json: objects key by key, and in a multimodal one also its text part."""

from collections.abc import Iterator

from copyengine.checkpoint.keys import Keys

TEXT = "text_config"
"""Where a multimodal config.json keeps the keys of its language model, which then count."""


def overridden(config: Keys, overrides: Keys) -> Keys:
    """`config` with `overrides` merged over it, objects key by key.

    A key that `config` has in its `text_config` goes there too, so that {"rope_parameters": ...} and {"text_config":
    {"rope_parameters": ...}} say the same of it.
    """
    text = config.get(TEXT)
    if isinstance(text, dict):
        inner = {key: value for key, value in overrides.items() if key in text}
        outer = {key: value for key, value in overrides.items() if key in config or key not in text}
        return merged(merged(config, {TEXT: inner}), outer)
    return merged(config, overrides)


def strangers(config: Keys, overrides: Keys) -> Iterator[str]:
    """The keys of `overrides`, and of its `text_config`, that `config` has nowhere: nothing may look at them."""
    text = config.get(TEXT)
    known = {*config, *(text if isinstance(text, dict) else ())}
    yield from (key for key in overrides if key not in known)
    inner = overrides.get(TEXT)
    if isinstance(inner, dict) and TEXT in config:
        yield from (f"{TEXT}.{key}" for key in inner if key not in known)


def merged(base: Keys, over: Keys) -> Keys:
    """`over` over `base`, objects key by key."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
