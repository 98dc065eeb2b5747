"""A script: sample's Triton kernels in the interpreter against the plain-torch reference: the tokens are equal.

Its arguments are sizes of vocabularies.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.sampling import FORBIDDEN, RowSampling, ref, tri

CHUNK, ROOM, BANDS = 16, 24, 8
"""Small, so that short rows have several chunks and some bands more logits than there is room."""


def reference(logits: torch.Tensor, rows: RowSampling) -> torch.Tensor:
    uniforms = ref.uniform(rows.seed, rows.position)
    return ref.sample(logits, *rows[:4], uniforms)


def settings(count: int, generator: torch.Generator) -> RowSampling:
    """Rows of every kind: greedy, plain, top_k, top_p, min_p, several of them; hot and cold."""

    def pick(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (count,), generator=generator)]

    return RowSampling(
        pick([0.0, 1.0, 0.7, 3.0, 1e-300, 1e9], torch.float64),
        pick([0, 0, 1, 2, 5, 20, 10**12], torch.int64),
        pick([1.0, 0.913, 0.4713, 0.0131, 0.9999], torch.float64),
        pick([0.0, 0.0, 0.213, 1e-9, 1.0], torch.float64),
        torch.randint(-(2**62), 2**62, (count,), generator=generator),
        torch.randint(0, 100_000, (count,), generator=generator),
    )


def cut_settings(repeats: int) -> RowSampling:
    """Hot rows of each combination with min_p, whose shares of the mass all draws must respect."""
    cuts = [(0, 1.0, 0.3), (0, 0.313, 0.01), (3, 1.0, 0.05), (12, 0.813, 0.2)] * repeats
    k, p, least = torch.tensor(cuts, dtype=torch.float64).unbind(1)
    index = torch.arange(len(cuts))
    return RowSampling(torch.full_like(p, 3.0), k.to(torch.int64), p, least, index, index)


if __name__ == "__main__":
    rows = cut_settings(4)
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)).mul(4).round().expand(16, -1)
    assert torch.equal(tri.sample(logits, *rows, chunk=CHUNK, candidates=ROOM, bands=BANDS), reference(logits, rows))
    for vocab in map(int, sys.argv[1:]):
        generator = torch.Generator().manual_seed(vocab)
        logits = torch.randn(22, vocab, generator=generator) * 4
        logits[5:10] = logits[5:10].round()  # ties
        logits[13:16] = logits[13:16].round()
        logits[8:10], logits[9] = 0.0, -0.0
        for row, bad in ((10, float("nan")), (11, float("inf")), (12, float("-inf"))):
            logits[row, vocab // 2] = bad
        for row, mask in ((14, -1e9), (15, -3.4e38), (16, -100.0)):
            logits[row, torch.rand(vocab, generator=generator) < 0.9] = mask
        logits[18:20, 1:] = logits[20:, :-1] = FORBIDDEN  # one is left
        rows = settings(22, generator)
        actual = tri.sample(logits, *rows, chunk=CHUNK, candidates=ROOM, bands=BANDS)
        expected = reference(logits, rows)
        assert torch.equal(actual, expected), (vocab, actual, expected)
    print("ok")
