"""open_model: against checkpoints that transformers saved, and against damage done to them on purpose."""

import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors
from safetensors.numpy import save_file

from copyengine.checkpoint import directory
from copyengine.checkpoint.model import dense_file_nbytes, expert_file_nbytes, open_model
from copyengine.checkpoint.random_model import Sizes, model_config, write_random_model
from copyengine.wire.errors import ConfigError
from tests.copyengine.checkpoint.conftest import SAVED
from tests.gqa_layers import gqa_of

TINY = Sizes(
    layers=2, hidden=16, intermediate=8, experts=4, experts_per_token=2, heads=2, kv_heads=1, head_dim=8, vocab_size=33
)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_random_model(tmp_path, TINY)
    return tmp_path


def edit_json(path: Path, change: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


@pytest.mark.parametrize("name", SAVED)
def test_every_saved_tensor_is_found_where_the_safetensors_library_finds_it(saved: Path, name: str) -> None:
    model = open_model(saved / name)
    ours = {*model.dense.values(), *(ref for _, ref in model.experts)}
    count = 0
    for path in shards(saved / name):
        data = path.read_bytes()
        for _, view in safetensors.deserialize(data):  # type: ignore[no-untyped-call]
            count += 1
            match = [r for r in ours if r.path == path and r.dtype == view["dtype"] and list(r.shape) == view["shape"]]
            assert any(data[r.offset : r.offset + r.nbytes] == view["data"] for r in match)
    assert count == len(ours)
    assert dense_file_nbytes(model) + expert_file_nbytes(model) == sum(ref.nbytes for ref in ours)


def test_the_geometry_transformers_stated(saved: Path) -> None:
    assert open_model(saved / "moe8").spec.moe_layers == (0, 2)
    assert open_model(saved / "moe5_f16_sparse").spec.moe_layers == (1, 3)
    assert gqa_of(open_model(saved / "moe8").spec.layers[0]).rope.theta == 50000.0
    assert gqa_of(open_model(saved / "moe60_sharded").spec.layers[0]).o_bias
    assert "head" not in open_model(saved / "moe8_f32_tied").dense
    assert open_model(saved / "dense").experts == ()
    dtypes = {name: open_model(saved / name).spec.checkpoint_dtype for name in SAVED}
    assert dtypes["moe8"] == "bfloat16" and dtypes["moe8_f32_tied"] == "float32"
    assert dtypes["moe5_f16_sparse"] == "float16"


def test_opening_a_checkpoint_of_many_tensors_is_quick(tmp_path: Path) -> None:
    """18,432 expert tensors, as many as Qwen3-30B-A3B has. The bound is ten times what it takes: a tripwire.

    In seconds of the processor: on a busy machine the clock runs on.
    """
    sizes = Sizes(48, 2, 1, 128, 8, heads=1, kv_heads=1, head_dim=2, vocab_size=3, dense_intermediate=1)
    write_random_model(tmp_path, sizes)
    start = time.process_time()
    open_model(tmp_path)
    assert time.process_time() - start < 3.0


def test_overrides_are_merged_deeply(tiny: Path) -> None:
    edit_json(tiny / "config.json", lambda c: c.update(rope_scaling={"type": "linear", "factor": 2.0}))
    spec = open_model(tiny, '{"rope_scaling": {"factor": 4}, "num_hidden_layers": 1}').spec
    assert (gqa_of(spec.layers[0]).rope.kind, gqa_of(spec.layers[0]).rope.factor) == ("linear", 4.0)
    assert len(spec.layers) == 1


def test_the_files_say_the_element_type_where_config_json_does_not(tiny: Path) -> None:
    edit_json(tiny / "config.json", lambda c: c.pop("torch_dtype"))
    assert open_model(tiny).spec.checkpoint_dtype == "bfloat16"


def test_unknown_tensors_are_counted_not_refused(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    open_model(tiny, '{"num_hidden_layers": 1}')
    assert "event=tensors_unused " in caplog.text and " tensors=21 input_scales=0" in caplog.text


def test_random_weights_are_marked(tiny: Path, saved: Path) -> None:
    assert open_model(tiny).random_weights
    assert not open_model(saved / "moe8").random_weights


NVFP4 = '{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}'


def test_made_up_weights_need_no_files(tmp_path: Path, tiny: Path) -> None:
    """Against the same model with its files, and with files that are damaged."""
    (tmp_path / "bare").mkdir()
    config = model_config(TINY)
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    whole, bare = open_model(tiny), open_model(tmp_path / "bare", load_format="dummy")
    assert bare.spec == whole.spec and bare.random_weights
    assert (bare.dense, bare.experts, dense_file_nbytes(bare), expert_file_nbytes(bare)) == ({}, (), 0, 0)
    shards(tiny)[0].write_bytes(b"")
    assert open_model(tiny, load_format="dummy").spec == whole.spec
    del config["torch_dtype"]
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    assert open_model(tmp_path / "bare", load_format="dummy").spec.checkpoint_dtype == "bfloat16"


def test_made_up_weights_may_be_quantised_where_the_files_are_not(tiny: Path) -> None:
    sizes = '"hidden_size": 32, "moe_intermediate_size": 16, '
    assert open_model(tiny, "{" + sizes + NVFP4[1:], "dummy").spec.expert_format.name == "nvfp4"


def refused(directory: Path, *words: str, overrides: str = "{}") -> None:
    with pytest.raises(ConfigError) as caught:
        open_model(directory, overrides)
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize(
    "overrides", ["", "{", "[1]", "3", "null", "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"]
)
def test_bad_overrides(tiny: Path, overrides: str) -> None:
    refused(tiny, "--hf-overrides", overrides=overrides)


def test_bad_directories(tmp_path: Path, tiny: Path) -> None:
    refused(tmp_path / "absent", "absent", "no such directory")
    refused(shards(tiny)[0], "no such directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "config.json", "no such file")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(model_config(TINY)))
    refused(tmp_path / "empty", "model.safetensors")
    (tmp_path / "empty" / "pytorch_model.bin").touch()
    refused(tmp_path / "empty", "pytorch_model.bin", "convert")


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe{}", b'{"architectures": ["LlamaForCausalLM"]}'])
def test_bad_config_json(tiny: Path, text: bytes) -> None:
    (tiny / "config.json").write_bytes(text)
    refused(tiny, "config.json")


def test_settings_that_would_take_gigabytes_are_refused_unread(tiny: Path) -> None:
    """99 MB of empty lists took 2.6 GB; of these here less would be seen."""
    (tiny / "config.json").write_text('{"a": [' + "[]," * 3_400_000 + "0]}")
    refused(tiny, "config.json", "larger than 10,000,000")


def test_what_the_system_will_not_read(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the operating system's own reasons."""
    refused(tmp_path / ("m" * 300), "mmm", os.strerror(errno.ENAMETOOLONG))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop", "loop", os.strerror(errno.ELOOP))
    for method, name in (("stat", "config.json"), ("stat", tiny.name), ("iterdir", tiny.name)):
        with monkeypatch.context() as patch:
            original = getattr(Path, method)

            def denied(self: Path, *args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                if self.name == name:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
                return original(self, *args, **kwargs)

            patch.setattr(Path, method, denied)
            if method == "iterdir":
                (tiny / "model.safetensors.index.json").unlink()
            refused(tiny, name, os.strerror(errno.EACCES))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_directory_or_a_pipe_where_a_file_is_expected(tiny: Path, name: str) -> None:
    (tiny / name).unlink(missing_ok=True)
    (tiny / name).mkdir()
    refused(tiny, str(tiny / name), "not a regular file")
    (tiny / name).rmdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tiny / name)
        refused(tiny, str(tiny / name), "not a regular file")


def test_a_text_file_without_end(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (tiny / "config.json").stat().st_size
    monkeypatch.setattr(directory, "MAX_TEXT_NBYTES", size - 1)
    refused(tiny, "config.json", "larger than")


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\udfff": 1}'])
def test_half_a_character_is_no_text(tiny: Path, text: str) -> None:
    """Against what UTF-8 can encode: names and messages have to be printed and sent."""
    (tiny / "config.json").write_text(text)
    refused(tiny, "config.json", "surrogates")


@pytest.mark.parametrize("depth", [500, 900, 5000, 100_000])
def test_objects_in_objects_without_end(tiny: Path, depth: int) -> None:
    """Merging goes as deep as the parser does, which differs between versions of Python."""
    deep = '{"a":' * depth + "1" + "}" * depth
    (tiny / "config.json").write_text(deep)
    refused(tiny, "config.json", overrides=deep)


def test_a_config_that_claims_very_much(tiny: Path) -> None:
    """4096 layers of 65,536 experts are 800 million tensors, which would fill the memory if they were listed."""
    many = '"num_hidden_layers": 4096, "num_experts": 65536, "num_experts_per_tok": 1'
    refused(tiny, "mlp.gate.weight", "65536", overrides=f"{{{many}}}")
    for claim in ("1000000000000", "1" + "0" * 30, "-1", "0", "true", "2.0", "1e300"):
        refused(tiny, "vocab_size", overrides=f'{{"vocab_size": {claim}}}')
    refused(tiny, "embed_tokens.weight", "2147483647", overrides='{"vocab_size": 2147483647}')


def test_missing_and_cut_shards(tiny: Path) -> None:
    first, second = shards(tiny)
    whole = second.read_bytes()
    for keep in (0, 7, 8, 9, 100, len(whole) - 1):
        second.write_bytes(whole[:keep])
        refused(tiny, str(second))
    second.unlink()
    refused(tiny, second.name, "missing")
    first.unlink()
    first.mkdir()
    refused(tiny, first.name)


@pytest.mark.parametrize(
    "shard",
    ["../model-00001-of-00002.safetensors", "/etc/x.safetensors", "C:x.safetensors", "a\\b.safetensors", "", ".."],
)
def test_an_index_may_not_leave_the_directory(tiny: Path, shard: str) -> None:
    edit_json(tiny / "model.safetensors.index.json", lambda i: i["weight_map"].update({"model.norm.weight": shard}))
    refused(tiny, "model.norm.weight", "plain")


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[" * 100_000])
def test_bad_index(tiny: Path, text: str) -> None:
    (tiny / "model.safetensors.index.json").write_text(text)
    refused(tiny, "model.safetensors.index.json", "malformed")


def test_an_index_that_names_what_its_shard_lacks(tiny: Path) -> None:
    first = shards(tiny)[0].name
    edit_json(tiny / "model.safetensors.index.json", lambda i: i["weight_map"].update({"model.norm.weight": first}))
    refused(tiny, "model.norm.weight", first)


def test_missing_misshapen_and_mistyped_tensors(tiny: Path) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    edit_json(tiny / "model.safetensors.index.json", lambda i: i["weight_map"].pop(name))
    refused(tiny, name, "missing")
    refused(tiny, "[33, 16]", "[34, 16]", overrides='{"vocab_size": 34}')
    edit_json(tiny / "model.safetensors.index.json", lambda i: i["weight_map"].pop("lm_head.weight"))
    refused(tiny, "lm_head.weight", "tie_word_embeddings", overrides='{"num_hidden_layers": 1}')
    open_model(tiny, '{"num_hidden_layers": 1, "tie_word_embeddings": true}')


def test_an_unsupported_element_type(tiny: Path) -> None:
    import numpy as np

    save_file({"model.norm.weight": np.ones(16, np.float64)}, tiny / "norm.safetensors")
    edit_json(
        tiny / "model.safetensors.index.json",
        lambda i: i["weight_map"].update({"model.norm.weight": "norm.safetensors"}),
    )
    refused(tiny, "model.norm.weight", "F64")


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    """As in transformers."""
    write_random_model(tmp_path, msgspec.structs.replace(TINY, shards=1))
    shutil.move(shards(tmp_path)[0], tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("not even JSON")
    assert {ref.path.name for ref in open_model(tmp_path).dense.values()} == {"model.safetensors"}
