"""Rotary tables against transformers' ROPE_INIT_FUNCTIONS, and angles against float64."""

import json
import math
from pathlib import Path

import pytest
import torch

from copyengine.model_spec import RopeSpec
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
