"""Rotary angles: RopeSpec -> cos and sin of each position.

Formulas are those of transformers' ROPE_INIT_FUNCTIONS (5.24), in float32 as there: YaRN (Peng et al. 2023), the
smoothing of Llama 3.1, linear interpolation. Dynamic NTK rescales only beyond `max_position`, where nothing is served,
so within it it is the default.
"""

import math
from collections.abc import Callable

import torch

from copyengine.model_spec import RopeSpec


class Rotary:
    """The angles of one RopeSpec and head size."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._inverse_frequencies = inverse_frequencies(spec, head_dim).to(device)
        self._attention_factor = attention_factor(spec)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [T, D/2] float32, of `positions` [T] int64, scaled by the attention factor."""
        angles = positions.to(torch.float32)[:, None] * self._inverse_frequencies
        return angles.cos() * self._attention_factor, angles.sin() * self._attention_factor


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each of the D/2 pairs, [D/2] float32. ValueError for a kind that is not known."""
    if spec.kind not in _KINDS:
        raise ValueError(f"unknown rope kind {spec.kind!r}; known: {', '.join(_KINDS)}")
    return _KINDS[spec.kind](spec, head_dim)


def attention_factor(spec: RopeSpec) -> float:
    """What cos and sin are multiplied by: YaRN's temperature, 1 for every other kind."""
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return _temperature(spec.factor, spec.mscale) / _temperature(spec.factor, spec.mscale_all_dim)
    return _temperature(spec.factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _default(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / spec.theta**exponents


def _linear(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    return _default(spec, head_dim) / spec.factor


def _yarn(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Fast pairs as trained, slow pairs interpolated, a linear ramp between the two."""
    extrapolated = _default(spec, head_dim)
    low, high = _yarn_range(spec, head_dim)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1.0 - ramp.clamp(0.0, 1.0)
    return extrapolated / spec.factor * (1.0 - kept) + extrapolated * kept


def _yarn_range(spec: RopeSpec, head_dim: int) -> tuple[float, float]:
    """The pairs between which the ramp runs: those that turn beta_fast and beta_slow times in the trained length."""

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(spec.original_max_position / (times * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_that_turns(spec.beta_fast), pair_that_turns(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high + 0.001 if low == high else high


def _llama3(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Long wavelengths divided by the factor, short ones kept, those between smoothed."""
    kept = _default(spec, head_dim)
    turns = spec.original_max_position * kept / (2 * math.pi)  # trained length over wavelength
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1.0 - smooth) * kept / spec.factor + smooth * kept


_KINDS: dict[str, Callable[[RopeSpec, int], torch.Tensor]] = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}
