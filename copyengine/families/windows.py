"""config.json -> which layers attend to a sliding window, and how wide it is. Reading as in transformers 5.24."""

from collections.abc import Sequence

from msgspec.structs import replace

from copyengine.checkpoint.keys import Keys, flag, integer, show, wrong
from copyengine.model_spec import GqaSpec
from copyengine.wire.errors import ConfigError

KINDS = ("full_attention", "sliding_attention")
"""Of `layer_types`."""

Windows = Sequence[int | None]
"""Of each layer; None for one that attends to all."""


def no_windows(config: Keys, count: int) -> None:
    """Of families that have none: ConfigError if the config asks for one, in a layer or in all."""
    refuse_windows(config)
    layer_windows(config, None, [False] * count)


def refuse_windows(config: Keys) -> None:
    """ConfigError if the config asks for windows; `layer_types` is not looked at."""
    if flag(config, "use_sliding_window"):
        raise wrong("use_sliding_window", True, "sliding windows are not supported in this family; set it to false")


def window_if_used(config: Keys) -> int | None:
    """Of Qwen's families: `sliding_window`, or 4096 if it is left out, where `use_sliding_window` says so."""
    return window(config, 4096) if flag(config, "use_sliding_window") else None


def window(config: Keys, default: int | None) -> int | None:
    """`sliding_window` in tokens, the token itself among them; None if it is null."""
    if config.get("sliding_window", default) is None:
        return None
    return integer(config, "sliding_window", default=default)


def layer_windows(config: Keys, size: int | None, sliding: Sequence[bool], by_layer: bool = False) -> Windows:
    """The window of each layer: `size` of those that are `sliding`, unless `layer_types` says which these are.

    Families whose layers are not read one by one (`by_layer`) may not be contradicted by `layer_types`. A window no
    shorter than the longest context is none.
    """
    kinds = config.get("layer_types")
    if kinds is not None:
        stated = _stated(kinds, len(sliding))
        if not by_layer and stated != list(sliding):
            raise wrong("layer_types", kinds, f"contradicts sliding_window ({show(size)}) of all layers; remove one")
        sliding = stated
    if any(sliding) and size is None:
        raise wrong("layer_types", kinds, "names sliding_attention, but no sliding_window is in use: state one")
    if size is not None and size >= integer(config, "max_position_embeddings"):
        size = None
    return [size if slides else None for slides in sliding]


def with_windows(attention: GqaSpec, windows: Windows) -> list[GqaSpec]:
    """`attention` of each layer."""
    return [replace(attention, window=window) for window in windows]


def _stated(kinds: object, count: int) -> list[bool]:
    if not isinstance(kinds, list) or any(kind not in KINDS for kind in kinds):
        raise wrong("layer_types", kinds, f"must be a list of {' and '.join(KINDS)}")
    if len(kinds) != count:
        raise ConfigError(f"config.json: layer_types has {len(kinds)} entries for {count} layers")
    return [kind == "sliding_attention" for kind in kinds]
