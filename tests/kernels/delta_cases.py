"""Steps of the gated delta rule and of the convolution before it, for tests on every device."""

from typing import NamedTuple

import numpy as np
import torch

from kernels.gated_delta import Gates, Tokens
from kernels.state_pieces import Pieces, Span, cut

SLOTS = 12


class Sizes(NamedTuple):
    key_heads: int
    heads: int
    k_dim: int
    v_dim: int


SPANS: dict[str, list[Span]] = {
    "one row from zeros": [Span(1, -1, [(1, 3)])],
    "one row that goes on": [Span(1, 3, [(1, 3)])],
    "nothing is kept": [Span(5, -1, [])],
    "under, at and over a piece": [Span(63, 0, [(63, 0)]), Span(64, -1, [(64, 1)]), Span(65, 2, [(65, 2)])],
    "snapshots inside and at the end": [
        Span(70, 4, [(1, 5), (2, 6), (66, 7), (70, 8), (70, 4)]),
        Span(3, 9, [(3, 10)]),
    ],
}
"""By what they show; of SLOTS state slots."""


def pieces_of(spans: list[Span], device: str = "cpu") -> Pieces:
    return Pieces(*(torch.from_numpy(array).to(device) for array in cut(spans)))


def tokens_of(rows: int, sizes: Sizes, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tokens:
    """Random ones, views of one product; the keys are alike, as a trained model's may be."""
    generator = torch.Generator().manual_seed(rows)
    keys, values = sizes.key_heads * sizes.k_dim, sizes.heads * sizes.v_dim
    widths = [keys, keys, values, sizes.heads, sizes.heads]
    total = -(-sum(widths) // 8) * 8  # so that every row starts as far from a multiple of 16 bytes as the first
    whole = torch.randn(rows, total, generator=generator)
    whole[:, keys : 2 * keys] += 2.0
    q, k, v, a, b = torch.split(whole.to(dtype).to(device)[:, : sum(widths)], widths, dim=1)
    q, k = (x.view(rows, sizes.key_heads, sizes.k_dim) for x in (q, k))
    return Tokens(q, k, v.view(rows, sizes.heads, sizes.v_dim), a, b)


def gates_of(sizes: Sizes, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Gates:
    """Heads that forget at once, and heads that never do."""
    a_log = torch.from_numpy(np.linspace(-6.0, 2.5, sizes.heads))
    return Gates(a_log.to(dtype).to(device), torch.linspace(-1.0, 1.0, sizes.heads).to(dtype).to(device))


def states_of(*shape: int, device: str = "cpu") -> torch.Tensor:
    """[SLOTS, *shape] float32, a view that is strided by slot."""
    elements = int(np.prod(shape))
    memory = torch.randn(SLOTS, elements + 5, generator=torch.Generator().manual_seed(elements)).to(device)
    return memory[:, 3 : 3 + elements].view(SLOTS, *shape)


def copy_of(states: torch.Tensor) -> torch.Tensor:
    """The same states, strided and aligned alike, as `clone` would not have them: kernels compile for both."""
    copy = states_of(*states.shape[1:], device=states.device.type)
    return copy.copy_(states)
