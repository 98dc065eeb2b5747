"""The quantiser's checkpoints: against kernels.quant through safetensors' own reader and writer, and interrupted."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from copyengine.checkpoint import quantise as tool
from copyengine.checkpoint.model import open_model
from copyengine.checkpoint.quantise import main, quantise_checkpoint, report
from copyengine.checkpoint.quantise_shards import make_shard
from copyengine.checkpoint.random_model import write_random_model
from copyengine.checkpoint.schemes import COMPRESSED_TENSORS, MODELOPT
from copyengine.checkpoint.shard_file import ShardFile
from copyengine.wire.errors import ConfigError
from kernels.quant import dequant
from tests.copyengine.checkpoint.quantised_files import DIALECTS, SIZES, DialectName, Made, Tensors
from tests.copyengine.checkpoint.test_quantised import assert_same_linears

SCHEMES = {"modelopt": MODELOPT, "compressed-tensors": COMPRESSED_TENSORS}
SMALL = 6000
"""Bytes in a shard; the quantised model takes eight of them."""


def tensors_of(directory: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_same_tensors(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        assert ours[name].flatten().view(torch.uint8).tolist() == tensor.flatten().view(torch.uint8).tolist(), name


def refused(source: Path, target: Path, *words: str, **more: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        quantise_checkpoint(source, target, **more)
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_tensors_and_the_records_read_from_them(tmp_path: Path, dialect: DialectName, dtype: str) -> None:
    """Each tensor as kernels.quant makes it, gate and up under the larger one's global; each record's float64 matrices
    as kernels.quant's."""
    made, target = Made(tmp_path, dialect, dtype, shared=True), tmp_path / "new" / "target"
    errors = quantise_checkpoint(made.source, target, SCHEMES[dialect], SMALL)
    assert_same_tensors(tensors_of(target), made.tensors)
    assert_same_linears(target, made.linears)
    weights = tensors_of(made.source)
    for layer in (0, 2):
        of_layer = [stem for stem in made.linears if stem.startswith(f"model.layers.{layer}.")]
        exact = [weights[f"{stem}.weight"].double() for stem in of_layer]
        error = sum(float((dequant(made.linears[s]) - w).square().sum()) for s, w in zip(of_layer, exact, strict=True))
        assert errors[layer] == pytest.approx((error, sum(float(w.square().sum()) for w in exact)))
    assert errors.keys() == {0, 2}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_config_is_the_source_s_and_names_what_is_not_quantised(tmp_path: Path, dialect: DialectName) -> None:
    made, target = Made(tmp_path, dialect, shared=True), tmp_path / "target"
    quantise_checkpoint(made.source, target, SCHEMES[dialect])
    config = json.loads((target / "config.json").read_text())
    stated = config.pop("quantization_config")
    assert config == json.loads((made.source / "config.json").read_text())
    linears = {name.removesuffix(".weight") for name, tensor in made.tensors.items() if tensor.dtype == torch.bfloat16}
    norms = {name for name in linears if name.endswith("norm")}
    assert set(stated["ignore"]) == linears - norms
    assert open_model(target).spec.expert_format.name == "nvfp4"


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_experts_are_written_under_the_prefix_they_had(tmp_path: Path, prefix: str) -> None:
    """Beside the tensors that stay as they are: the checkpoint opens, and only names differ."""
    made, source = Made(tmp_path, "modelopt", shared=True), tmp_path / "source2"
    shutil.copytree(made.source, source)
    for path in source.glob("*.safetensors*"):
        path.unlink()

    def renamed(tensors: Tensors) -> Tensors:
        head = "language_model.lm_head." if prefix == "language_model.model." else "lm_head."
        inner = {name.removeprefix("lm_head."): name for name in tensors if name.startswith("lm_head.")}
        plain = {name: tensor for name, tensor in tensors.items() if name not in inner.values()}
        heads = {head + rest: tensors[name] for rest, name in inner.items()}
        return {prefix + name.removeprefix("model."): tensor for name, tensor in plain.items()} | heads

    save_file(renamed(tensors_of(made.source)), source / "model.safetensors")
    target = tmp_path / "target"
    quantise_checkpoint(source, target)
    assert_same_tensors(tensors_of(target), renamed(made.tensors))
    assert open_model(target).spec.expert_format.name == "nvfp4"


def test_shards_are_bounded_and_a_tokenizer_comes_along(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    sizes = msgspec.structs.replace(SIZES, vocab_size=259)
    write_random_model(source, sizes)
    (source / "notes.bin").write_bytes(b"1")
    quantise_checkpoint(source, target, shard_nbytes=17_000)
    shards = sorted(target.glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    for path in shards:
        assert sum(tensor.nbytes for tensor in load_file(path).values()) <= 17_000
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    others = {path.name for path in target.iterdir()} - {path.name for path in [*shards, *source.iterdir()]}
    assert others == {"quantise.json"} and not (target / "notes.bin").exists()


def test_what_is_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    made, target = Made(tmp_path, "modelopt", shared=True), tmp_path / "target"
    quantise_checkpoint(made.source, target, shard_nbytes=1)
    sizes = [len(load_file(path)) for path in target.glob("*.safetensors")]
    assert set(sizes) == {1, 3, 6}  # what stays as it is, what down becomes, and what gate and up do
    assert_same_tensors(tensors_of(target), made.tensors)


def test_experts_of_a_layer_in_one_tensor_become_linears(tmp_path: Path) -> None:
    """Against the same experts in tensors of their own."""
    made, target = Made(tmp_path, "modelopt", shared=True), tmp_path / "target"
    weights = tensors_of(made.source)
    experts = [name for name in weights if ".experts." in name]
    apart = {name: weights.pop(name) for name in experts}
    for i in (0, 2):
        e = [f"model.layers.{i}.mlp.experts.{expert}" for expert in range(SIZES.experts)]
        gate_up = [torch.cat([apart[f"{x}.gate_proj.weight"], apart[f"{x}.up_proj.weight"]]) for x in e]
        weights[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        weights[f"model.layers.{i}.mlp.experts.down_proj"] = torch.stack([apart[f"{x}.down_proj.weight"] for x in e])
    fused = tmp_path / "fused"
    fused.mkdir()
    save_file(weights, fused / "model.safetensors")
    shutil.copy(made.source / "config.json", fused)
    quantise_checkpoint(fused, target)
    assert_same_tensors(tensors_of(target), made.tensors)


def test_tensors_of_no_use_to_us_are_kept(tmp_path: Path) -> None:
    made, target = Made(tmp_path, "modelopt", shared=True), tmp_path / "target"
    extra = {"model.layers.3.mtp.weight": torch.arange(7), "empty": torch.empty(0, 4)}
    weights = tensors_of(made.source) | extra
    for path in made.source.glob("*.safetensors*"):
        path.unlink()
    save_file(weights, made.source / "model.safetensors")
    quantise_checkpoint(made.source, target, shard_nbytes=SMALL)
    assert_same_tensors(tensors_of(target), made.tensors | extra)


class Interrupted:
    """Lets some shards be made, then fails; counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> None:
        self.made: list[str] = []
        original = make_shard

        def make(target: Path, shard: Any, *more: Any) -> Any:
            if len(self.made) == after:
                raise error
            self.made.append(shard.name)
            return original(target, shard, *more)

        monkeypatch.setattr(tool, "make_shard", make)


@pytest.mark.parametrize("done", [0, 1, 3])
def test_what_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int) -> None:
    """Against a run that was not: the same files, byte for byte; what was complete is not made again."""
    made, target, whole = Made(tmp_path, "modelopt", shared=True), tmp_path / "target", tmp_path / "whole"
    errors = quantise_checkpoint(made.source, whole, shard_nbytes=SMALL)
    with monkeypatch.context() as patch:
        Interrupted(patch, done, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            quantise_checkpoint(made.source, target, shard_nbytes=SMALL)
    assert len(list(target.glob("*.safetensors"))) == done and not (target / "config.json").exists()
    again = Interrupted(monkeypatch, 99, KeyboardInterrupt())
    assert quantise_checkpoint(made.source, target, shard_nbytes=SMALL) == errors
    assert files_of(target) == files_of(whole)
    assert len(again.made) == len(list(target.glob("*.safetensors"))) - done
    assert quantise_checkpoint(made.source, target, shard_nbytes=SMALL) == errors
    assert len(again.made) == len(list(target.glob("*.safetensors"))) - done


def test_a_shard_that_was_lost_or_cut_is_made_again(tmp_path: Path) -> None:
    made, target = Made(tmp_path, "modelopt", shared=True), tmp_path / "target"
    quantise_checkpoint(made.source, target, shard_nbytes=SMALL)
    before = files_of(target)
    first, second, *_ = sorted(target.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(before[second.name][:-1])
    quantise_checkpoint(made.source, target, shard_nbytes=SMALL)
    assert files_of(target) == before


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete shards stay, nothing of the others does; then it goes on."""
    made, target = Made(tmp_path, "modelopt", shared=True), tmp_path / "target"
    original, count = ShardFile.write, [0]

    def write(self: ShardFile, *data: Any) -> None:
        count[0] += 1
        if count[0] > 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, *data)

    with monkeypatch.context() as patch:
        patch.setattr(ShardFile, "write", write)
        refused(made.source, target, str(target), os.strerror(errno.ENOSPC), "kept", shard_nbytes=SMALL)
    names = {path.name for path in target.iterdir()} - {tool.LOCK_FILE}
    assert names == {"quantise.json", *(f"model-{i:05d}-of-00008.safetensors" for i in range(1, len(names)))}
    assert 1 < len(names) < 9
    quantise_checkpoint(made.source, target, shard_nbytes=SMALL)
    assert_same_tensors(tensors_of(target), made.tensors)


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, target = Made(tmp_path, "modelopt", shared=True), tmp_path / "target"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2_000))
    refused(made.source, target, str(target), "0 MB are free")
    assert not list(target.glob("*.safetensors"))


def test_what_a_killed_run_left_takes_no_room_from_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard half written, on a disk with room for all shards but not for that one too."""
    made, target, whole = Made(tmp_path, "modelopt", shared=True), tmp_path / "target", tmp_path / "whole"
    quantise_checkpoint(made.source, whole, shard_nbytes=SMALL)
    with monkeypatch.context() as patch:
        Interrupted(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            quantise_checkpoint(made.source, target, shard_nbytes=SMALL)
    third = sorted(whole.glob("*.safetensors"))[2].name
    (target / f".{third}.part").write_bytes(bytes(1000))
    room = sum(path.stat().st_size for path in whole.glob("*.safetensors"))

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=room - sum(file.stat().st_size for file in path.iterdir() if "model" in file.name))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    quantise_checkpoint(made.source, target, shard_nbytes=SMALL)
    assert files_of(target) == files_of(whole)


def test_targets_that_are_something_else(tmp_path: Path) -> None:
    made, other = Made(tmp_path, "modelopt", shared=True), tmp_path / "other"
    before = files_of(made.source)
    refused(made.source, made.source, str(made.source), "something else", "config.json")
    assert files_of(made.source) == before
    other.write_text("text")
    refused(made.source, other, str(other), "no directory")
    other.unlink()
    other.mkdir()
    quantise_checkpoint(made.source, other)
    refused(made.source, other, "another scheme", scheme=COMPRESSED_TENSORS)
    refused(made.source, other, "another shard_nbytes", shard_nbytes=SMALL)
    refused(other, tmp_path / "third", str(other), "already quantised", "nvfp4")
    first = sorted(made.source.glob("*.safetensors"))[0]
    os.utime(first, (1, 1))
    refused(made.source, other, "other files")
    (other / "quantise.json").write_text("{")
    refused(made.source, other, "quantise.json", "damaged")


def test_two_do_not_make_it_at_once(tmp_path: Path) -> None:
    made, target = Made(tmp_path, "modelopt", shared=True), tmp_path / "target"
    target.mkdir()
    with FileLock(target / tool.LOCK_FILE):
        refused(made.source, target, str(target), "another process")
    quantise_checkpoint(made.source, target)
    assert_same_tensors(tensors_of(target), made.tensors)
    assert not (target / tool.LOCK_FILE).exists()


def test_sources_that_cannot_be_quantised(tmp_path: Path) -> None:
    target = tmp_path / "target"
    refused(tmp_path / "absent", target, "absent", "no such directory")
    for change, words in (({"experts": 0}, ["without experts"]), ({"intermediate": 24}, ["16", "24"])):
        source = tmp_path / min(change)
        source.mkdir()
        write_random_model(source, msgspec.structs.replace(SIZES, **change))
        refused(source, target, *words)
    assert not target.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_no_number(tmp_path: Path, value: float) -> None:
    made, name = Made(tmp_path, "modelopt", shared=True), "model.layers.2.mlp.experts.3.up_proj.weight"
    for path in made.source.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name][3, 4] = value
            save_file(tensors, path)
    refused(made.source, tmp_path / "target", name, "not finite")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the function: its figures, its refusals as exit code 2."""
    made, target = Made(tmp_path, "compressed-tensors"), tmp_path / "target"
    arguments = [str(made.source), str(target), "--format", "nvfp4", "--dialect", "compressed-tensors"]
    assert main([*arguments, "--shard-mb", "1"]) == 0
    errors = quantise_checkpoint(made.source, target, COMPRESSED_TENSORS, 10**6)
    out = capsys.readouterr().out
    assert out == f"{report(errors)}\n{target}\n" and "layer 2: 9." in out and "layer 1:" not in out
    assert main(arguments) == 2 and "another shard_nbytes" in capsys.readouterr().err
    assert main([*arguments, "--shard-mb", "0"]) == 2 and "--shard-mb 0" in capsys.readouterr().err
    Interrupted(monkeypatch, 0, KeyboardInterrupt())
    assert main([*arguments[:1], str(tmp_path / "x"), *arguments[2:]]) == 130
    assert "start it again" in capsys.readouterr().err


def test_a_bar_on_a_terminal_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "BAR_S", -1.0)
    bar = tool._Bar(4_000_000, True)
    bar.add(1_000_000)
    drawn = capsys.readouterr().err
    assert "25%" in drawn and "1 of 4 MB" in drawn and "#" * 10 + "." * 30 in drawn and "left" not in drawn
    bar._start -= 100
    bar.add(1_000_000)
    bar.end()
    assert "50%  2 of 4 MB, 100 s left" in capsys.readouterr().err
    tool._Bar(4, False).add(1)
    assert capsys.readouterr().err == ""
