"""The scored cache policy: least recently and frequently used (LRFU, Lee et al., IEEE Trans. Computers 50, 2001).

A slot's score at the time `now` is the sum over its uses of 2 ** (-(now - time of the use) / half_life): lambda is
1 / half_life, in the clock of admissions. Scores shrink all alike, so that their order does not change between uses. It
is that of the time at which a single use would give the same score, its *stamp*:

    stamp = last + half_life * log2(score at last),    stamp after a use at now = now + bump(now - stamp before),
    bump(d) = half_life * log2(1 + 2 ** (-d / half_life))

So stamps take the place of the times of last use, and the smallest go first, as with the policy "lru". Whoever admits
looks bump up in a table of whole numbers, the reference and the device in the same one, and so they agree on ties.
"""

import math

import torch
from torch import Tensor

REACH = 8
"""Half-lives that a stamp may lie before or behind the clock as the table tells them apart: a score of 2 ** 8 is as
good as any more, and one of 2 ** -8 adds nothing to a use."""
STEPS = 256
"""Entries of the table for each half-life."""


def bumps(half_life: int, device: torch.device | str = "cpu") -> Tensor:
    """[2 * REACH * STEPS] int64: entry i is bump(d) for d from (i / STEPS - REACH) half-lives on; REACH * half_life at
    most; of a half-life in clock ticks. Empty for 0, the policy "lru". ValueError for one below that."""
    if half_life < 0:
        raise ValueError(f"half_life {half_life}: must be at least 0")
    if not half_life:
        return torch.zeros(0, dtype=torch.int64, device=device)
    lives = [i / STEPS - REACH for i in range(2 * REACH * STEPS)]
    entries = [min(round(half_life * math.log2(1 + 2**-d)), REACH * half_life) for d in lives]
    return torch.tensor(entries, dtype=torch.int64, device=device)


def half_life_of(layers: int, steps: int) -> int:
    """Clock ticks of `steps` decode steps of a model of `layers` MoE layers, each of which admits one query."""
    return layers * steps
