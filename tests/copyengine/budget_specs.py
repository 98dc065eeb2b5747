"""Models for the tests of what memory takes."""

from msgspec.structs import asdict, replace

from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.families import parse_spec
from copyengine.model_spec import GqaSpec, ModelSpec
from kernels.formats import layout

GB = 10**9
TINY = Sizes(layers=2, hidden=8, intermediate=4, heads=2, kv_heads=1, head_dim=4, vocab_size=10)
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
NVFP4_RECORD = 2_765_056
"""Bytes of an expert of `flash_next`."""


def spec_of(experts: int, per_token: int, sizes: Sizes = TINY) -> ModelSpec:
    """Of `sizes`, with these experts."""
    config = model_config(sizes) | {"num_experts": experts, "num_experts_per_tok": per_token}
    return parse_spec(config)


STATE_NBYTES = 1000


class GqaWithState(GqaSpec, frozen=True, tag="gqa_with_state"):
    """Attention that keeps a recurrent state besides."""

    @property
    def state_nbytes(self) -> int:
        return STATE_NBYTES


def with_state(spec: ModelSpec) -> ModelSpec:
    """`spec` with a state of STATE_NBYTES in its first layer."""
    first, *others = spec.layers
    return replace(spec, layers=(replace(first, attention=GqaWithState(**asdict(first.attention))), *others))


def record_of(spec: ModelSpec, dtype: str = "bfloat16") -> int:
    """Bytes of an unquantised expert."""
    return layout(dtype, spec.hidden, spec.moe.intermediate).record_nbytes if spec.moe else 0


def flash_next(**changes: object) -> ModelSpec:
    """Qwen3.8-Flash-Next's geometry as a Qwen3-MoE, with NVFP4 experts."""
    sizes = Sizes(
        layers=48, hidden=2560, intermediate=640, experts=512, experts_per_token=10, heads=24, kv_heads=2, head_dim=256,
        vocab_size=248320, max_position=262144,
    )  # fmt: skip
    return parse_spec(model_config(sizes) | NVFP4 | changes)
