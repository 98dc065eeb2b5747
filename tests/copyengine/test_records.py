"""record_layout: against kernels.formats and against the record of Flash-Next, by hand."""

from typing import Any

import pytest

from copyengine.checkpoint.random_model import Sizes, model_config
from copyengine.families import parse_spec
from copyengine.model_spec import ModelSpec
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from kernels.formats import layout

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def spec_of(hidden: int = 32, intermediate: int = 16, quantisation: Any = None, experts: int = 4) -> ModelSpec:
    sizes = Sizes(layers=1, hidden=hidden, intermediate=intermediate, experts=experts, experts_per_token=1)
    return parse_spec({**model_config(sizes), "quantization_config": quantisation})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_unquantised_experts_are_what_the_rest_is(dtype: str) -> None:
    assert record_layout(spec_of(33, 7), dtype) == layout(dtype, 33, 7)
    assert record_layout(spec_of(experts=0), dtype) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantised_experts_keep_their_format(dtype: str) -> None:
    """One expert of Flash-Next: 2,457,600 bytes of codes, 307,200 of scales, and its globals in 128 bytes each."""
    record = record_layout(spec_of(2560, 640, NVFP4), dtype)
    assert record == layout("nvfp4", 2560, 640)
    assert record.record_nbytes == 2_457_600 + 307_200 + 2 * 128


@pytest.mark.parametrize(
    ("spec", "dtype", "words"),
    [
        (spec_of(quantisation=NVFP4), "float16", ["--dtype float16", "nvfp4", "bfloat16"]),
        (spec_of(hidden=40, quantisation=NVFP4), "bfloat16", ["config.json", "40", "16"]),
        (spec_of(intermediate=8, quantisation=NVFP4), "bfloat16", ["config.json", "8", "16"]),
    ],
)
def test_what_no_kernel_computes_is_refused(spec: ModelSpec, dtype: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        record_layout(spec, dtype)
    assert all(word in str(caught.value) for word in words)
