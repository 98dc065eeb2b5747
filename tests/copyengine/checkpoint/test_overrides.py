"""--hf-overrides: against merging by hand, and against a checkpoint whose config.json says it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from copyengine.checkpoint.directory import read_config, unknown_overrides
from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.overrides import overridden, strangers

MULTIMODAL = {"dtype": "bfloat16", "text_config": {"dtype": "float32", "rope_parameters": {"rope_theta": 1e6}, "a": 1}}


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ({"rope_parameters": {"factor": 4}}, {"rope_parameters": {"rope_theta": 1e6, "factor": 4}}),
        ({"text_config": {"rope_parameters": {"factor": 4}}}, {"rope_parameters": {"rope_theta": 1e6, "factor": 4}}),
        ({"a": None}, {"a": None}),
        ({"text_config": {"b": 2}}, {"b": 2}),
        ({}, {}),
    ],
)
def test_keys_of_the_text_part_are_reached_with_and_without_its_name(
    overrides: dict[str, Any], changed: dict[str, Any]
) -> None:
    """By hand."""
    expected = {**MULTIMODAL, "text_config": {**MULTIMODAL["text_config"], **changed}}  # type: ignore[dict-item]
    assert overridden(MULTIMODAL, overrides) == expected


def test_a_key_of_both_is_overridden_in_both_and_a_new_one_is_the_whole_one_s() -> None:
    """By hand."""
    found = overridden(MULTIMODAL, {"dtype": "float16", "new": 3})
    assert found["dtype"] == "float16" and found["new"] == 3
    assert found["text_config"] == {**MULTIMODAL["text_config"], "dtype": "float16"}  # type: ignore[dict-item]


def test_keys_that_are_nowhere_are_named() -> None:
    """By hand; what an object of the config holds is its own affair."""
    overrides = {
        "rope_parameter": {},
        "a": 2,
        "text_config": {"rope_parameters": {"factor": 2}, "vocab": 1},
        "dtype": 1,
    }
    assert list(strangers(MULTIMODAL, overrides)) == ["rope_parameter", "text_config.vocab"]
    assert list(strangers({"a": 1}, {"text_config": {"a": 2}})) == ["text_config"]


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}


def with_rope(checkpoint: Path, target: Path, rope: dict[str, Any]) -> Path:
    """A copy of `checkpoint` whose text has these rope_parameters."""
    shutil.copytree(checkpoint, target)
    config = json.loads((target / "config.json").read_text())
    config.get("text_config", config)["rope_parameters"] = rope
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("case", ["yarn", "deepseek_v3"])
def test_yarn_by_override_is_the_model_that_transformers_agrees_with(case: str, goldens: Path, tmp_path: Path) -> None:
    """Against the checkpoint with YaRN in its config.json, whose logits test_pre_norm.py of the worker compares."""
    written = open_model(goldens / case).spec
    rope = json.loads((goldens / case / "config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == "yarn"
    plain = with_rope(goldens / case, tmp_path / "plain", {"rope_type": "default", "rope_theta": rope["rope_theta"]})
    assert open_model(plain).spec != written
    assert open_model(plain, json.dumps({"rope_parameters": rope})).spec == written


def test_yarn_of_a_text_part_by_override_is_yarn_in_its_config(goldens: Path, tmp_path: Path) -> None:
    """Against the same checkpoint with YaRN written into its text_config, in both spellings."""
    plain = goldens / "qwen3_5_moe"
    rope = json.loads((plain / "config.json").read_text())["text_config"]["rope_parameters"]
    written = with_rope(plain, tmp_path / "written", rope | YARN)
    assert open_model(written).spec != open_model(plain).spec
    for overrides in ({"rope_parameters": YARN}, {"text_config": {"rope_parameters": YARN}}):
        text = json.dumps(overrides)
        assert read_config(plain, text) == read_config(written) and unknown_overrides(plain, text) == []
        assert open_model(plain, text).spec == open_model(written).spec
    assert unknown_overrides(plain, '{"rope_parms": {}}') == ["rope_parms"]
