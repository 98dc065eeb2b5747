"""Rotary tables against transformers' ROPE_INIT_FUNCTIONS, and angles against float64."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from copyengine.families.rope import ROPE_KINDS, rope
from copyengine.model_spec import RopeSpec
from copyengine.wire.errors import ConfigError
from tests.worker.transformers_oracle import ROPES
from worker.model.rotary import Rotary, attention_factor, inverse_frequencies

SPELLING = {"rope_theta": "theta", "rope_type": "kind", "original_max_position_embeddings": "original_max_position"}


@pytest.mark.parametrize("case", ROPES)
def test_frequencies_and_attention_factor_are_those_of_transformers(case: str, goldens: Path) -> None:
    golden = json.loads((goldens / "rope.json").read_text())[case]
    spec = RopeSpec(**{SPELLING.get(key, key): value for key, value in golden["parameters"].items()})
    ours = inverse_frequencies(spec, golden["head_dim"])
    torch.testing.assert_close(ours, torch.tensor(golden["inverse_frequencies"]), rtol=1e-6, atol=0.0)
    assert attention_factor(spec) == pytest.approx(golden["attention_factor"], rel=1e-12)


def test_the_cases_differ_from_one_another(goldens: Path) -> None:
    """Against the default: a kind that fell through to it would otherwise pass where scaling does nothing."""
    golden = json.loads((goldens / "rope.json").read_text())
    plain = {
        name: torch.tensor(case["inverse_frequencies"])
        for name, case in golden.items()
        if case["parameters"]["rope_type"] in ("linear", "yarn", "llama3")
    }
    for name, frequencies in plain.items():
        theta = golden[name]["parameters"]["rope_theta"]
        default = inverse_frequencies(RopeSpec(theta), golden[name]["head_dim"])
        assert not torch.allclose(frequencies, default, rtol=0.1, atol=0.0), name


def test_cos_and_sin_are_those_of_float64_times_the_factor() -> None:
    spec = RopeSpec(10000.0, "yarn", 4.0, 2048, attention_factor=1.25)
    positions = torch.tensor([0, 1, 127, 128, 2047])
    cos, sin = Rotary(spec, 16, torch.device("cpu")).cos_sin(positions)
    angles = positions.double()[:, None] * inverse_frequencies(spec, 16).double()
    assert cos.shape == sin.shape == (5, 8) and cos.dtype == torch.float32
    torch.testing.assert_close(cos.double(), 1.25 * angles.cos(), atol=2e-4, rtol=0)
    torch.testing.assert_close(sin.double(), 1.25 * angles.sin(), atol=2e-4, rtol=0)


def test_yarn_with_both_mscales_is_the_ratio_of_temperatures() -> None:
    """Against YaRN's formula, 0.1 m ln(s) + 1."""
    spec = RopeSpec(10000.0, "yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=0.5)
    ratio = (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert attention_factor(spec) == pytest.approx(ratio)


def test_an_unknown_kind_is_refused() -> None:
    """Against the docstring."""
    with pytest.raises(ValueError, match="longrope"):
        inverse_frequencies(RopeSpec(10000.0, "longrope"), 16)


EDGES = st.sampled_from(
    [0, 5e-324, 1e-45, 1e-30, 1e-6, 1e-5, 0.5, 1, 1 + 2**-52, 1.5, 4, 32, 128, 1e6, 1e30, 2**31 - 1]
)
PARAMETERS = ["rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"]
PARAMETERS += ["mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"]


@settings(max_examples=400)
@given(
    kind=st.sampled_from(ROPE_KINDS),
    parameters=st.dictionaries(st.sampled_from(PARAMETERS), EDGES | st.floats(1e-6, 1e6), max_size=5),
    head_dim=st.sampled_from([2, 4, 128]),
    max_position=st.sampled_from([1, 2, 4096, 2**31 - 1]),
)
def test_what_a_config_may_state_turns_by_finite_angles(
    kind: str, parameters: dict[str, float], head_dim: int, max_position: int
) -> None:
    """Against the refusals of the config's reader: what it lets pass must not end in a division by zero, or NaN."""
    needed = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = {"max_position_embeddings": max_position, "rope_scaling": {"rope_type": kind, **needed, **parameters}}
    try:
        spec = rope(config, head_dim)
    except ConfigError:
        return
    cos, sin = Rotary(spec, head_dim, torch.device("cpu")).cos_sin(torch.tensor([0, 1, max_position - 1]))
    assert bool(cos.isfinite().all()) and bool(sin.isfinite().all())
