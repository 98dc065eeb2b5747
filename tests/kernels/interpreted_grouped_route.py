"""A script: grouped_route's Triton kernel in the interpreter, in float32, against the plain-torch reference."""

import os
import warnings

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.topk_route import grouped_ref, grouped_tri

CASES = [(0, 8, 2, 2, 1), (3, 2, 1, 1, 1), (5, 60, 6, 3, 2), (9, 64, 8, 8, 4), (4, 256, 8, 8, 4), (3, 384, 8, 1, 1)]
"""T, E, K, groups, groups per token."""

warnings.simplefilter("ignore")  # numpy's, of NaN and of exponentials that overflow
for tokens, num_experts, k, groups, taken in CASES:
    generator = torch.Generator().manual_seed(num_experts)
    spread = torch.randn(tokens, num_experts, generator=generator) * 3
    ties = torch.randint(-2, 3, (tokens, num_experts), generator=generator).float()
    for logits in (spread, ties, spread - 200.0 * ties.abs(), spread.T.contiguous().T):
        # Biases of either sign and beyond 1; and such that sums are 0 of either sign.
        biases = (torch.randn(num_experts, generator=generator), torch.full((num_experts,), -0.5))
        both = (False, True) if logits is spread or logits is ties else (True, False)
        for bias, renormalise in zip(biases, both, strict=True):
            arguments = (logits, bias, k, groups, taken, renormalise, 2.5)
            weights, experts = grouped_tri.grouped_route(*arguments)
            expected_weights, expected_experts = grouped_ref.grouped_route(*arguments)
            assert torch.equal(experts, expected_experts), (num_experts, k)
            torch.testing.assert_close(weights, expected_weights, atol=1e-7, rtol=2e-6)

for bad in (float("nan"), float("inf"), float("-inf")):
    for logits in (torch.full((1, 40), bad), torch.cat((torch.full((1, 3), bad), torch.zeros(1, 37)), dim=1)):
        for groups, taken in ((1, 1), (4, 2)):
            _, experts = grouped_tri.grouped_route(logits, torch.zeros(40), 8, groups, taken, True, 1.0)
            assert len(set(experts[0].tolist())) == 8 and experts.min() >= 0 and experts.max() < 40
print("ok")
