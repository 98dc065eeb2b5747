"""What the gated delta rule is computed of."""

from typing import NamedTuple

import torch


class Tokens(NamedTuple):
    """T rows; each key head serves Hv / Hk consecutive value heads. Views whose last dimension is contiguous."""

    q: torch.Tensor  # [T, Hk, Dk]
    k: torch.Tensor  # [T, Hk, Dk]
    v: torch.Tensor  # [T, Hv, Dv]
    a: torch.Tensor  # [T, Hv]
    b: torch.Tensor  # [T, Hv]


class Gates(NamedTuple):
    """What a layer has learned of its gates."""

    a_log: torch.Tensor  # [Hv]
    dt_bias: torch.Tensor  # [Hv]
