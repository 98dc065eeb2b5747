"""read_dense and read_experts: byte for byte against the safetensors library, conversions against torch's."""

import threading
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
from numpy.typing import NDArray

from copyengine.checkpoint import reader
from copyengine.checkpoint.convert import NUMPY_DTYPE, converted
from copyengine.checkpoint.files import Files
from copyengine.checkpoint.header import TensorRef
from copyengine.checkpoint.model import Model, dense_file_nbytes, expert_file_nbytes, open_model
from copyengine.checkpoint.names import ExpertName
from copyengine.checkpoint.random_model import Sizes, write_random_model
from copyengine.checkpoint.reader import read_dense, read_experts
from copyengine.model_spec import ModelSpec
from copyengine.wire.errors import ConfigError
from kernels.formats import ExpertFormat, Field, RecordLayout, layout
from tests.copyengine.checkpoint.conftest import SAVED

DTYPES = ("bfloat16", "float16", "float32")
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FILE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def library_tensors(directory: Path) -> dict[str, NDArray[np.generic]]:
    """Every tensor as the safetensors library finds its bytes."""
    return {
        name: np.frombuffer(view["data"], NUMPY_DTYPE[FILE[view["dtype"]]]).reshape(view["shape"])
        for path in directory.glob("*.safetensors")
        for name, view in safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    }


def torch_cast(source: NDArray[np.generic], dtype: str) -> NDArray[np.uint8]:
    """The bytes of `source` as torch converts it."""
    bits = torch.from_numpy(np.frombuffer(bytearray(source.tobytes()), np.uint8))
    return bits.view(TORCH[source.dtype.name]).to(TORCH[dtype]).view(torch.uint8).numpy()


def empty_banks(model: Model, record: RecordLayout) -> list[NDArray[np.uint8]]:
    moe = model.spec.moe
    assert moe is not None
    return [np.full((moe.experts, record.record_nbytes), 0xA5, np.uint8) for _ in model.spec.moe_layers]


def layout_of(model: Model, dtype: str) -> RecordLayout:
    moe = model.spec.moe
    assert moe is not None
    return layout(dtype, model.spec.hidden, moe.intermediate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SAVED)
def test_dense_tensors(saved: Path, name: str, dtype: str) -> None:
    model = open_model(saved / name)
    library = library_tensors(saved / name)
    counted: list[int] = []
    ours = dict(read_dense(model, dtype, counted.append))
    assert set(ours) == set(model.dense) and sum(counted) == dense_file_nbytes(model)
    pairs = {
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "layers.1.attention.k": "model.layers.1.self_attn.k_proj.weight",
        "layers.0.attention.q_norm": "model.layers.0.self_attn.q_norm.weight",
        "layers.0.ffn_norm": "model.layers.0.post_attention_layernorm.weight",
        "layers.0.input_norm": "model.layers.0.input_layernorm.weight",
        "layers.1.router": "model.layers.1.mlp.gate.weight",
        "layers.1.ffn.down": "model.layers.1.mlp.down_proj.weight",
        "layers.1.attention.v_bias": "model.layers.1.self_attn.v_proj.bias",
        "layers.1.attention.o_bias": "model.layers.1.self_attn.o_proj.bias",
        "head": "lm_head.weight",
    }
    for canonical, source in pairs.items():
        if canonical in ours:
            assert ours[canonical].dtype == NUMPY_DTYPE[dtype] and ours[canonical].shape == library[source].shape
            assert ours[canonical].tobytes() == torch_cast(library[source], dtype).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in SAVED if name != "dense"])
@pytest.mark.parametrize("batch_nbytes", [1, 5000, reader.BATCH_NBYTES])
def test_banks(saved: Path, name: str, dtype: str, batch_nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "BATCH_NBYTES", batch_nbytes)
    model = open_model(saved / name)
    library = library_tensors(saved / name)
    record = layout_of(model, dtype)
    banks = empty_banks(model, record)
    counted: list[int] = []
    assert read_experts(model, record, banks, counted.append) == expert_file_nbytes(model) == sum(counted)
    for bank, layer in zip(banks, model.spec.moe_layers, strict=True):
        for e in range(bank.shape[0]):
            prefix = f"model.layers.{layer}.mlp.experts.{e}."
            gate, up, down = (library[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down"))
            fields = {"gate_up": np.concatenate([gate, up]), "down": down}
            expected = np.full(record.record_nbytes, 0xA5, np.uint8)  # nothing is written between the fields
            for field, values in fields.items():
                place = record.field(field)
                expected[place.offset : place.offset + place.nbytes] = torch_cast(values, dtype)
            assert np.array_equal(bank[e], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_experts_fill_the_same_banks(tmp_path: Path, dtype: str) -> None:
    """Against the fused tensors' own bytes: their rows lie as the record's do."""
    sizes = Sizes(layers=2, hidden=16, intermediate=8, experts=5, experts_per_token=2, vocab_size=9, fused_experts=True)
    (tmp_path / "fused").mkdir()
    write_random_model(tmp_path / "fused", sizes)
    model = open_model(tmp_path / "fused")
    assert len(model.experts) == 4
    library = library_tensors(tmp_path / "fused")
    record = layout_of(model, dtype)
    banks = empty_banks(model, record)
    assert read_experts(model, record, banks, lambda _: None) == expert_file_nbytes(model)
    for layer, bank in enumerate(banks):
        for field in record.fields:
            ours = bank[:, field.offset : field.offset + field.nbytes]
            fused = library[f"model.layers.{layer}.mlp.experts.{field.name}_proj"]
            assert ours.tobytes() == torch_cast(fused, dtype).tobytes()


SCALED = RecordLayout(  # a quantised format of the future: each field of a type and rank of its own
    ExpertFormat("scaled"),
    2,
    3,
    (
        Field("codes", "bfloat16", (6, 2), 0, 24),
        Field("row_scales", "float32", (6,), 128, 24),
        Field("global", "float16", (), 256, 2),
        Field("pair", "float32", (2,), 384, 8),
    ),
    512,
)
PARTS: list[tuple[str, int, int, tuple[int, ...], str]] = [  # field, part, parts, shape and type in the files
    ("codes", 0, 2, (3, 2), "bfloat16"),
    ("codes", 1, 2, (3, 2), "float32"),
    ("row_scales", 0, 2, (3,), "bfloat16"),
    ("row_scales", 1, 2, (3,), "float32"),
    ("global", 0, 1, (), "float32"),
    ("pair", 0, 2, (), "float16"),
    ("pair", 1, 2, (1,), "float32"),
]


@pytest.mark.parametrize("fused", [False, True])
def test_fields_of_any_type_and_rank(tmp_path: Path, fused: bool) -> None:
    """Against torch's conversion of each part to its field's type, put where the field and the part are."""
    ref_dtypes = {ours: theirs for theirs, ours in FILE.items()}
    rng = np.random.default_rng(0)
    expected = np.full((2, SCALED.record_nbytes), 0xA5, np.uint8)
    experts: list[tuple[ExpertName, TensorRef]] = []
    data = b""
    for name, part, parts, shape, dtype in PARTS:
        field = SCALED.field(name)
        values = np.asarray(rng.standard_normal((2, *shape))).astype(NUMPY_DTYPE[dtype])
        start, nbytes = field.offset + part * field.nbytes // parts, field.nbytes // parts
        for e in range(2):
            expected[e, start : start + nbytes] = torch_cast(values[e].reshape(-1), field.dtype)
        whole: list[tuple[int | None, NDArray[np.generic]]] = [(None, values)]
        for expert, array in whole if fused else enumerate(values):
            array = np.asarray(array)
            ref = TensorRef(tmp_path / "x", len(data), array.nbytes, ref_dtypes[dtype], array.shape)
            experts.append((ExpertName(0, expert, name, part, parts, name, array.shape), ref))
            data += array.tobytes()
    (tmp_path / "x").write_bytes(data)
    spec = ModelSpec("any", 1, 1, 1e-6, 1, True, "bfloat16", ())
    banks = [np.full((2, SCALED.record_nbytes), 0xA5, np.uint8)]
    assert read_experts(Model(tmp_path, spec, {}, {}, tuple(experts)), SCALED, banks, lambda _: None) == len(data)
    assert np.array_equal(banks[0], expected)


def test_every_byte_is_read_once_and_in_order(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the files' own sizes: all reads together cover the tensors' bytes of every shard exactly."""
    reads: list[tuple[Path, int, int]] = []
    original = Files.read_all
    lock = threading.Lock()

    def spy(self: Files, path: Path, offset: int, targets: Sequence[memoryview], stop: int = 0) -> None:
        with lock:
            reads.append((path, offset, sum(map(len, targets))))
        original(self, path, offset, targets, stop)

    monkeypatch.setattr(Files, "read_all", spy)
    model = open_model(saved / "moe60_sharded")
    list(read_dense(model, "bfloat16", lambda _: None))
    assert reads == sorted(reads)
    record = layout_of(model, "bfloat16")
    read_experts(model, record, empty_banks(model, record), lambda _: None)
    for path in (saved / "moe60_sharded").glob("*.safetensors"):
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        end = header
        for _, offset, nbytes in sorted(read for read in reads if read[0] == path):
            assert offset == end
            end += nbytes
        assert end == path.stat().st_size


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    write_random_model(tmp_path, Sizes(layers=2, hidden=16, intermediate=8, experts=4, experts_per_token=2))
    model = open_model(tmp_path)
    path = tmp_path / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:3000])
    record = layout_of(model, "bfloat16")
    with pytest.raises(ConfigError, match=path.name):
        read_experts(model, record, empty_banks(model, record), lambda _: None)
    with pytest.raises(ConfigError, match=path.name):
        list(read_dense(model, "bfloat16", lambda _: None))
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_dense(model, "bfloat16", lambda _: None))


def test_an_error_of_the_observer_ends_the_reading(saved: Path) -> None:
    model = open_model(saved / "moe60_sharded")
    record = layout_of(model, "bfloat16")

    def stop(_: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        read_experts(model, record, empty_banks(model, record), stop)


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    write_random_model(tmp_path, Sizes(layers=1, hidden=16, intermediate=8, experts=2, experts_per_token=1))
    model = open_model(tmp_path)
    ref = model.dense["layers.0.router"]
    with open(ref.path, "r+b") as file:
        file.seek(ref.offset)
        file.write(ml_dtypes.bfloat16(70000.0).tobytes())
    with pytest.raises(ConfigError, match=r"layers\.0\.router.*float16"):
        list(read_dense(model, "float16", lambda _: None))
    list(read_dense(model, "float32", lambda _: None))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_every_bit_pattern_converts_as_in_torch(source: str, target: str) -> None:
    """All 65,536 patterns of the 16-bit types; of float32 those, each with ties, near-ties and noise below."""
    patterns = np.arange(65536, dtype=np.uint16)
    if source == "float32":
        low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x1000, 0x1001, 0xFFFF], np.uint32)
        values = ((patterns.astype(np.uint32) << 16)[:, None] + low).reshape(-1).view(np.float32)
    else:
        values = patterns.view(NUMPY_DTYPE[source])
    with np.errstate(all="ignore"):
        kept = np.isfinite(values) & np.isfinite(values.astype(np.float32).astype(NUMPY_DTYPE[target]))
    values = values[kept]
    ours = converted(values, target, Path("x"), "t")
    assert ours.tobytes() == torch_cast(values, target).tobytes()
