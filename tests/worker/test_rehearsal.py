"""What is rehearsed, against every number of tokens there is."""

import pytest
import torch

from copyengine.model_spec import DenseSpec, GqaSpec, LayerSpec, ModelSpec, RopeSpec
from kernels.formats import layout
from kernels.grouped_gemm import variant
from tests.worker.random_weights import random_weights
from worker.backend import Rehearsal
from worker.drawing import BLOCK_ROWS, Drawn, Extras, OfLogits, with_extras
from worker.kv import KvCache
from worker.model import build_model
from worker.rehearsal import extras_of_a_block, kernels_of, rehearse, sizes_to_rehearse


@pytest.mark.parametrize(("experts", "k", "expert_format"), [(512, 10, "nvfp4"), (64, 8, "bfloat16"), (8, 2, "nvfp4")])
@pytest.mark.parametrize("longest", [1, 15, 17, 100, 4096])
def test_every_size_has_its_kernels_rehearsed(experts: int, k: int, expert_format: str, longest: int) -> None:
    """Tiles and block sizes of the GEMM, and the numbers that Triton compiles for; not more sizes than it needs."""
    record = layout(expert_format, 64, 32)

    def kernels(tokens: int) -> object:
        return kernels_of(tokens, k, None), variant(tokens, k, experts, record, torch.device("cpu"))

    sizes = sizes_to_rehearse(longest, kernels)
    assert sizes[-1] == longest and sizes == sorted(set(sizes)) and sizes[0] == 1
    rehearsed = {kernels(size) for size in sizes}
    assert all(kernels(tokens) in rehearsed for tokens in range(1, longest + 1))
    assert len(sizes) <= len(rehearsed) + 1 <= 24


@pytest.mark.parametrize("rows", [1, BLOCK_ROWS])
def test_all_that_a_row_can_want_is_rehearsed(rows: int) -> None:
    """No array is empty, or else what computes on it would not be launched; a block is as large as it says."""
    extras = extras_of_a_block(rows)
    assert len(extras.changed) == 1 and all(len(array) >= rows for array in extras.changed[0])
    assert len(extras.told) == rows


def test_blocks_of_every_size_are_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dense model, which needs no slots: it has its KV to write to, and rows want everything."""
    seen = []

    def seeing(drawn: Drawn, extras: Extras, on_device: list[torch.Tensor], logprobs: OfLogits) -> torch.Tensor:
        seen.append((len(drawn.tokens), drawn.logits.shape[1]))
        return with_extras(drawn, extras, on_device, logprobs)

    monkeypatch.setattr("worker.rehearsal.with_extras", seeing)
    layer = LayerSpec(GqaSpec(4, 2, 8, False, True, RopeSpec(1e4)), DenseSpec(16))
    spec = ModelSpec("Qwen3ForCausalLM", 50, 32, 1e-6, 64, True, "float32", (layer, layer))
    kv = KvCache(spec, 2, 4, torch.float32, torch.device("cpu"))
    rehearse(Rehearsal(spec, build_model(spec, random_weights(spec), kv, None), kv, None, 0, 8, 2))
    assert seen == [(rows, 50) for rows in range(1, BLOCK_ROWS + 1)]
