"""A script: the Triton kernels of topk_route in the interpreter, in float32, against the plain-torch reference."""

import os
import warnings

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from kernels.topk_route import ref, tri

CASES = [
    (0, 4, 2),
    (3, 1, 1),
    (2, 2, 2),
    (5, 60, 2),
    (9, 127, 8),
    (9, 128, 8),
    (9, 129, 32),
    (4, 512, 10),
    (1, 4096, 7),
]
"""T, E, K."""

for tokens, num_experts, k in CASES:
    generator = torch.Generator().manual_seed(num_experts)
    spread = torch.randn(tokens, num_experts, generator=generator) * 3
    ties = torch.randint(-2, 3, (tokens, num_experts), generator=generator).float()
    far = spread - 200.0 * ties.abs()  # most probabilities are exactly 0: ties too
    for logits in (spread, ties, far, spread.T.contiguous().T):
        for renormalise in (False, True):
            weights, experts = tri.topk_route(logits, k, renormalise)
            expected_weights, expected_experts = ref.topk_route(logits, k, renormalise)
            assert torch.equal(experts, expected_experts), (num_experts, k)
            torch.testing.assert_close(weights, expected_weights, atol=1e-7, rtol=2e-6)
        weights, experts = tri.topk_softmax(logits, k)
        expected_weights, expected_experts = ref.topk_softmax(logits, k)
        assert torch.equal(experts, expected_experts), (num_experts, k)
        torch.testing.assert_close(weights, expected_weights, atol=1e-7, rtol=2e-6)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # numpy's, of NaN
    for bad in (float("nan"), float("inf"), float("-inf")):
        for logits in (torch.full((1, 40), bad), torch.cat((torch.full((1, 3), bad), torch.zeros(1, 37)), dim=1)):
            for _, experts in (tri.topk_route(logits, 8, True), tri.topk_softmax(logits, 8)):
                assert len(set(experts[0].tolist())) == 8 and experts.min() >= 0 and experts.max() < 40
print("ok")
