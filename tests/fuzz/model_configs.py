"""config.json of every family, with quantisation, overrides and generation_config.json: a spec, or a named refusal."""

import json
import tempfile
from pathlib import Path
from typing import Any

from copyengine.checkpoint.directory import read_config
from copyengine.families import parse_spec
from copyengine.records import record_layout
from copyengine.wire.errors import ConfigError
from scheduler.http.default_sampling import read_default_sampling
from scheduler.tokenize import load_text_codec
from tests.copyengine.families.test_deepseek_v3 import DEEPSEEK_V3
from tests.copyengine.families.test_parse_spec import GPT_OSS, HUB, LLAMA3, MODELOPT, SMALL, YARN, mixed
from tests.copyengine.families.test_quantisation import EXPORTED, PACKED
from tests.copyengine.families.test_qwen3_next import NEXT
from tests.fuzz.source import Source, as_json, changed

ARCHITECTURES: tuple[str, ...] = (
    "Qwen3MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "MixtralForCausalLM",
)
ARCHITECTURES += ("OlmoeForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
CONFIGS: list[dict[str, Any]] = [HUB, SMALL, GPT_OSS, DEEPSEEK_V3, NEXT, {**NEXT, "text_config": NEXT}]
CONFIGS += [{**HUB, "architectures": [name], "model_type": "x"} for name in ARCHITECTURES]
QUANTISED: list[Any] = [
    None,
    MODELOPT,
    mixed(),
    PACKED,
    EXPORTED,
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
]
QUANTISED += [{"quant_method": "mxfp4"}, {"quant_method": "fp8", "fmt": "e4m3"}]
ROPES: list[Any] = [None, YARN, LLAMA3, {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}]
GENERATION = {"eos_token_id": [1, 2], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.0}


def one_input(data: bytes) -> None:
    source = Source(data)
    config = dict(source.pick(CONFIGS))
    if source.byte() & 1:
        config["quantization_config"] = source.pick(QUANTISED)
    if source.byte() & 1:
        config[source.pick(("rope_scaling", "rope_parameters"))] = source.pick(ROPES)
    overrides = json.dumps(changed(source, {"num_hidden_layers": 2, "rope_scaling": {"factor": 2.0}}))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_bytes(as_json(source, changed(source, config)))
        if source.byte() & 1:
            (directory / "generation_config.json").write_bytes(as_json(source, changed(source, GENERATION)))
        if source.byte() < 64:
            (directory / "hf_quant_config.json").write_bytes(
                as_json(source, changed(source, {"quantization": MODELOPT}))
            )
        _read(directory, overrides if source.byte() & 1 else "{}")


def _read(directory: Path, overrides: str) -> None:
    for read in (read_default_sampling, lambda path: load_text_codec(path, {})):
        try:
            read(directory)
        except ConfigError as error:
            _named(error)
    try:
        spec = parse_spec(read_config(directory, overrides))
        record_layout(spec, "bfloat16")
        assert spec.hidden > 0 and spec.vocab_size > 0 and spec.layers
    except ConfigError as error:
        _named(error)


def _named(error: ConfigError) -> None:
    """One line that a person can read, of a length that does not depend on the file's."""
    text = str(error)
    assert text and "\n" not in text and len(text) < 2000, text
