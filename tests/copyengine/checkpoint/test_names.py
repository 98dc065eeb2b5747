"""Names of quantised experts: against lists written out by hand."""

import pytest

from copyengine.checkpoint.names import Dialect, ExpertTensor, dialect_of, expert_names, names_linears
from copyengine.checkpoint.schemes import (
    COMPRESSED_FP8_CHANNEL,
    COMPRESSED_MXFP4,
    COMPRESSED_TENSORS,
    MODELOPT,
    MODELOPT_FP8,
    SCHEMES,
    Scheme,
    beside,
    fp8_block,
)
from copyengine.checkpoint.spellings import respelt
from copyengine.families import FAMILIES
from copyengine.families.qwen3 import FUSED, HUB
from copyengine.model_spec import GqaSpec, LayerSpec, ModelSpec, MoeSpec, RopeSpec
from kernels.formats import ExpertFormat

ATTENTION = GqaSpec(2, 1, 8, False, False, RopeSpec(1e4))
LAYER = LayerSpec(ATTENTION, MoeSpec(3, 1, 32, True))
SPEC = ModelSpec("any", 9, 64, 1e-6, 64, False, "bfloat16", (LAYER,), ExpertFormat("nvfp4"))
OTHER = Dialect(
    {"embed": "e"},
    (
        ExpertTensor("layer{i}.moe.{e}.w1.weight", "gate_up", part=0, parts=2),
        ExpertTensor("layer{i}.moe.{e}.w2.weight", "down"),
    ),
)
"""Linears of another family's names and order."""

UNEVEN = fp8_block(24, 40)
Row = tuple[str, str, int, int, tuple[int, ...], str]
EXPECTED: dict[str, list[Row]] = {
    MODELOPT.name: [
        ("layer0.moe.2.w1.weight", "gate_up", 0, 2, (32, 32), "codes"),
        ("layer0.moe.2.w1.weight_scale", "gate_up_scale", 0, 2, (32, 4), "scales"),
        ("layer0.moe.2.w1.weight_scale_2", "gate_up_global", 0, 2, (1,), "global"),
        ("layer0.moe.2.w2.weight", "down", 0, 1, (64, 16), "codes"),
        ("layer0.moe.2.w2.weight_scale", "down_scale", 0, 1, (64, 2), "scales"),
        ("layer0.moe.2.w2.weight_scale_2", "down_global", 0, 1, (1,), "global"),
    ],
    COMPRESSED_TENSORS.name: [
        ("layer0.moe.2.w1.weight_packed", "gate_up", 0, 2, (32, 32), "codes"),
        ("layer0.moe.2.w1.weight_scale", "gate_up_scale", 0, 2, (32, 4), "scales"),
        ("layer0.moe.2.w1.weight_global_scale", "gate_up_global", 0, 2, (1,), "reciprocal"),
        ("layer0.moe.2.w2.weight_packed", "down", 0, 1, (64, 16), "codes"),
        ("layer0.moe.2.w2.weight_scale", "down_scale", 0, 1, (64, 2), "scales"),
        ("layer0.moe.2.w2.weight_global_scale", "down_global", 0, 1, (1,), "reciprocal"),
    ],
    COMPRESSED_MXFP4.name: [
        ("layer0.moe.2.w1.weight_packed", "gate_up", 0, 2, (32, 32), "codes"),
        ("layer0.moe.2.w1.weight_scale", "gate_up_scale", 0, 2, (32, 2), "powers"),
        ("layer0.moe.2.w2.weight_packed", "down", 0, 1, (64, 16), "codes"),
        ("layer0.moe.2.w2.weight_scale", "down_scale", 0, 1, (64, 1), "powers"),
    ],
    MODELOPT_FP8.name: [
        ("layer0.moe.2.w1.weight", "gate_up", 0, 2, (32, 64), "e4m3"),
        ("layer0.moe.2.w1.weight_scale", "gate_up_scale", 0, 2, (1,), "factor"),
        ("layer0.moe.2.w2.weight", "down", 0, 1, (64, 32), "e4m3"),
        ("layer0.moe.2.w2.weight_scale", "down_scale", 0, 1, (1,), "factor"),
    ],
    COMPRESSED_FP8_CHANNEL.name: [
        ("layer0.moe.2.w1.weight", "gate_up", 0, 2, (32, 64), "e4m3"),
        ("layer0.moe.2.w1.weight_scale", "gate_up_scale", 0, 2, (32, 1), "blocks"),
        ("layer0.moe.2.w2.weight", "down", 0, 1, (64, 32), "e4m3"),
        ("layer0.moe.2.w2.weight_scale", "down_scale", 0, 1, (64, 1), "blocks"),
    ],
    UNEVEN.name: [
        ("layer0.moe.2.w1.weight", "gate_up", 0, 2, (32, 64), "e4m3"),
        ("layer0.moe.2.w1.weight_scale_inv", "gate_up_scale", 0, 2, (2, 2), "blocks"),
        ("layer0.moe.2.w2.weight", "down", 0, 1, (64, 32), "e4m3"),
        ("layer0.moe.2.w2.weight_scale_inv", "down_scale", 0, 1, (3, 1), "blocks"),
    ],
}
ALL = (*SCHEMES[:-1], UNEVEN)


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: str(scheme.name))
def test_tensors_of_a_linear_follow_from_its_name(scheme: Scheme) -> None:
    entries = list(expert_names(SPEC, OTHER, scheme))
    found = [(e.source, e.field, e.part, e.parts, e.shape, e.kind) for e in entries if e.expert == 2]
    assert found == EXPECTED[scheme.name]
    assert len(entries) == 3 * len(found) and {entry.bank for entry in entries} == {0}


def test_only_dialects_that_name_linears_are_of_quantised_files() -> None:
    """Of the three, the one that spells the tensors that are there; the first that may be, if none does."""
    assert [names_linears(dialect) for dialect in (FUSED, HUB, OTHER)] == [False, True, True]
    dialects = (FUSED, OTHER, HUB)
    for dialect in (OTHER, HUB):
        sources = {dialect.dense["embed"], *(entry.source for entry in expert_names(SPEC, dialect, MODELOPT))}
        assert dialect_of(SPEC, dialects, sources, MODELOPT) is dialect
    assert dialect_of(SPEC, dialects, set(), MODELOPT) is OTHER
    assert dialect_of(SPEC, (FUSED,), set(), MODELOPT) is FUSED


@pytest.mark.parametrize("architecture", sorted(set(FAMILIES) - {"GptOssForCausalLM"}))  # it fuses its experts
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme.name))
def test_every_family_has_a_dialect_for_quantised_experts(architecture: str, scheme: Scheme) -> None:
    """Against the number of linears: no two tensors share a name, none has a placeholder left."""
    dialect = next(filter(names_linears, FAMILIES[architecture].dialects))
    names = [entry.source for entry in expert_names(SPEC, dialect, scheme)]
    assert len(set(names)) == len(names) == 3 * 3 * len(scheme.tensors) and not any("{" in name for name in names)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("a.b.weight", "a.b.x"), ("a.weight", "a.x"), ("weight", "x"), ("a.bias", ""), ("a.weights", ""), ("", "")],
)
def test_what_is_beside_a_weight(source: str, expected: str) -> None:
    assert beside(source, "x") == expected


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_family_s_names_under_every_prefix(architecture: str) -> None:
    """Against the first dialect's names with the prefixes written out; the head is outside the decoder's."""
    family = FAMILIES[architecture]
    dialects = family.spellings
    assert dialects[: len(family.dialects)] == family.dialects and len(set(map(str, dialects))) == len(dialects)
    for inner, head in (("model.language_model.", ""), ("language_model.model.", "language_model."), ("model.", "")):
        embed = f"{inner}embed_tokens.weight"
        matching = [dialect for dialect in dialects if dialect.dense["embed"] == embed]
        assert matching
        for dialect in matching:
            assert (
                dialect.dense["head"] == f"{head}lm_head.weight"
                and dialect.dense["final_norm"] == f"{inner}norm.weight"
            )
            names = {*dialect.dense.values(), *(row.source for row in dialect.experts)} - {f"{head}lm_head.weight"}
            assert all(name.startswith(inner) for name in names)


@pytest.mark.parametrize(
    "name", ["model.layers.3.x", "model.language_model.layers.3.x", "language_model.model.layers.3.x"]
)
def test_names_that_are_the_same_under_other_prefixes(name: str) -> None:
    assert respelt(name) == ("model.layers.3.x", "model.language_model.layers.3.x", "language_model.model.layers.3.x")
    assert respelt("language_model.lm_head") == respelt("lm_head") == ("lm_head", "language_model.lm_head")
    assert respelt("transformer.h.3") == ("transformer.h.3",)
