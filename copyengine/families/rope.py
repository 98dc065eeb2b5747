"""config.json -> RopeSpec, for all families alike."""

from copyengine.checkpoint.keys import Keys, flag, integer, nested, number, wrong
from copyengine.model_spec import RopeSpec

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")

MIN_BETA = 1e-6
"""Turns in the trained length; the formulas divide by them, and the usual ones are 1 and 32."""


def rope(config: Keys, head_dim: int) -> RopeSpec:
    """From `rope_parameters`, or `rope_theta` and `rope_scaling`; defaults as in transformers' modeling_rope_utils."""
    old, new = nested(config, "rope_scaling"), nested(config, "rope_parameters")
    merged = {**new, **old}
    kind = old.get("rope_type") or old.get("type") or new.get("rope_type") or new.get("type") or "default"
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise wrong("rope_type", kind, f"is not supported; known: {', '.join(ROPE_KINDS)}")
    for key, neutral in (("partial_rotary_factor", 1), ("mrope_section", None)):
        value = config.get(key) if merged.get(key) is None else merged[key]
        if value is not None and value != neutral:
            raise wrong(key, value, "is not supported; remove it")
    return _scaled_rope(kind, _theta(config, merged), merged, config, head_dim)


def _theta(config: Keys, rope: Keys) -> float:
    outer = number(config, "rope_theta", low=1.0, default=0.0)
    inner = number(rope, "rope_theta", low=1.0, default=0.0)
    if outer and inner and outer != inner:
        raise wrong("rope_theta", outer, f"contradicts rope_parameters.rope_theta ({inner}): state one of them")
    theta = outer or inner or 10000.0
    if theta == 1.0:
        raise wrong("rope_theta", theta, "must be above 1: all pairs would turn alike")
    return theta


def _scaled_rope(kind: str, theta: float, rope: Keys, config: Keys, head_dim: int) -> RopeSpec:
    max_position = integer(config, "max_position_embeddings")
    original = integer(rope, "original_max_position_embeddings", default=max_position)
    original = integer(config, "original_max_position_embeddings", default=original)
    match kind:
        case "linear":
            return RopeSpec(theta, kind, number(rope, "factor", low=1.0))
        case "dynamic":
            if head_dim < 4:
                raise wrong("head_dim", head_dim, "must be at least 4 for the dynamic rope type")
            return RopeSpec(theta, kind, number(rope, "factor", low=1.0), max_position)
        case "yarn":
            return _yarn(theta, rope, max_position, original)
        case "llama3":
            low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
            if not 0.0 < low < high:
                raise wrong("low_freq_factor", low, f"must be above 0 and below high_freq_factor ({high})")
            factor = number(rope, "factor", low=1.0)
            return RopeSpec(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
        case _:
            return RopeSpec(theta)


def _yarn(theta: float, rope: Keys, max_position: int, original: int) -> RopeSpec:
    fast = number(rope, "beta_fast", low=MIN_BETA, default=32.0)
    slow = number(rope, "beta_slow", low=MIN_BETA, default=1.0)
    if fast < slow:
        raise wrong("beta_fast", fast, f"must be at least beta_slow ({slow})")
    return RopeSpec(
        theta,
        "yarn",
        number(rope, "factor", low=1.0, default=max(1.0, max_position / original)),
        original,
        attention_factor=None if rope.get("attention_factor") is None else number(rope, "attention_factor"),
        beta_fast=fast,
        beta_slow=slow,
        mscale=None if rope.get("mscale") is None else number(rope, "mscale"),
        mscale_all_dim=None if rope.get("mscale_all_dim") is None else number(rope, "mscale_all_dim"),
        truncate=flag(rope, "truncate", default=True),
    )
