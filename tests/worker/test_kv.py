"""KV pages against a dict of (page, place) -> row."""

import pytest
import torch

from copyengine.budget import kv_token_nbytes
from copyengine.model_spec import DenseSpec, GqaSpec, LayerSpec, ModelSpec, RopeSpec
from worker.kv import KvCache, KvLayer

CPU = torch.device("cpu")


def spec_with(*heads: tuple[int, int]) -> ModelSpec:
    """A model whose layers have these (kv_heads, head_dim)."""
    layers = tuple(LayerSpec(GqaSpec(4, kv, dim, False, True, RopeSpec(1e4)), DenseSpec(8)) for kv, dim in heads)
    return ModelSpec("Qwen3ForCausalLM", 10, 16, 1e-6, 64, True, "float32", layers)


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
@pytest.mark.parametrize("rows", [0, 1, 17, 127, 128, 129])
def test_append_puts_every_row_in_its_place_and_nothing_else(rows: int, page_tokens: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    layer = KvLayer(rows + 2, page_tokens, [(2, 4)] * 2, torch.float32, CPU)
    places = torch.randperm((rows + 2) * page_tokens, generator=generator)[:rows]
    k, v = (torch.randn(rows, 2, 4, generator=generator) for _ in range(2))
    layer.append(k, v, places // page_tokens, places % page_tokens)
    for stored, given in ((layer.k, k), (layer.v, v)):
        model = {int(place): row for place, row in zip(places, given, strict=True)}
        for place, row in enumerate(stored.flatten(0, 1)):
            assert torch.equal(row, model.get(place, torch.zeros(2, 4)))


def test_sizes_are_those_of_the_layers() -> None:
    """Against the arithmetic written out and against what was planned, for layers that are not alike."""
    spec = spec_with((2, 8), (1, 32))
    cache = KvCache(spec, num_pages=5, page_tokens=4, dtype=torch.bfloat16, device=CPU)
    assert [tuple(layer.k.shape) for layer in cache.layers] == [(5, 4, 2, 8), (5, 4, 1, 32)]
    assert cache.nbytes == 5 * 4 * 2 * 2 * (2 * 8 + 1 * 32)
    assert cache.nbytes == 5 * 4 * kv_token_nbytes(spec, "bfloat16")


@pytest.mark.parametrize(("pages", "tokens"), [(0, 4), (4, 0)])
def test_an_empty_cache_is_refused(pages: int, tokens: int) -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match="at least 1"):
        KvCache(spec_with((1, 8)), pages, tokens, torch.float32, CPU)
