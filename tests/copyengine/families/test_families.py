"""The table of families: against the tensors that their models have, and against the worker's own table."""

import math
from typing import Any

import pytest

from copyengine.checkpoint.names import Dialect, ExpertTensor, dense_names, dialect_of, expert_names
from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.families import FAMILIES, parse_spec
from copyengine.families.qwen3 import FUSED, HUB
from copyengine.model_spec import ModelSpec
from kernels.formats import layout
from worker.model import FAMILIES as BUILDERS

SIZES = Sizes(layers=3, hidden=16, intermediate=8, experts=5, experts_per_token=2, dense_layers=(1,), vocab_size=33)

OWN: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 8, "kv_lora_rank": 6, "q_lora_rank": 4, "qk_nope_head_dim": 4}
    | {"qk_rope_head_dim": 2, "v_head_dim": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"n_routed_experts": 5},
}
"""Keys of config.json that one family has."""


def spec_of(architecture: str = "Qwen3MoeForCausalLM", **changes: Any) -> ModelSpec:
    shared = {"shared_expert_intermediate_size": 12}
    config = {**model_config(SIZES), "architectures": [architecture], **shared}
    return parse_spec({**config, **OWN.get(architecture, {}), **changes})


def sources(spec: ModelSpec, dialect: Dialect) -> list[str]:
    return [entry.source for names in (dense_names, expert_names) for entry in names(spec, dialect)]


def test_every_family_has_a_builder() -> None:
    """Against the table of worker.model, which is where the other half of a family is."""
    assert set(FAMILIES) == set(BUILDERS)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("bias", [False, True])
def test_every_dialect_spells_every_tensor_in_its_own_way(architecture: str, bias: bool) -> None:
    """Against the specs of the family: no name is missing, none is used twice, no placeholder is left."""
    spec = spec_of(architecture, attention_bias=bias, hidden_size=64, intermediate_size=32)
    for dialect in FAMILIES[architecture].dialects:
        names = sources(spec, dialect)
        assert len(set(names)) == len(names) and not any("{" in name for name in names)
        canonical = [entry.name for entry in dense_names(spec, dialect)]
        assert len(set(canonical)) == len(canonical) and not any("{" in name for name in canonical)


@pytest.mark.parametrize("dialect", [HUB, FUSED])
def test_expert_tensors_fill_the_record(dialect: Dialect) -> None:
    """Against the layout: each expert's parts have as many elements as its fields, once over."""
    spec = spec_of()
    record = layout("bfloat16", 16, 8)
    filled: dict[tuple[int, int, str], int] = {}
    for entry in expert_names(spec, dialect):
        for e in range(5) if entry.expert is None else [entry.expert]:
            key = (entry.bank, e, entry.field)
            filled[key] = filled.get(key, 0) + math.prod(entry.shape[1:] if entry.expert is None else entry.shape)
    wanted = {(bank, e, f.name): math.prod(f.shape) for bank in range(2) for e in range(5) for f in record.fields}
    assert filled == wanted


def test_a_further_dialect_is_a_further_row() -> None:
    """Against a made-up one that shares no name and no grouping with the others."""
    spec = spec_of()
    dense = {name: f"transformer.{name}" for name in HUB.dense}
    other = Dialect(dense, tuple(ExpertTensor(f"x.{{i}}.{f}", f) for f in ("gate_up", "down")))
    dialects = (HUB, FUSED, other)
    for dialect in dialects:
        assert dialect_of(spec, dialects, set(sources(spec, dialect))) is dialect
    assert dialect_of(spec, dialects, set()) is HUB
    assert "transformer.layers.2.router" in sources(spec, other)
