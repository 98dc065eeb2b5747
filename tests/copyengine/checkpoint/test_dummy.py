"""fill_dummy_experts: decoded by the reference kernels, against the stated sizes; and against its own second run."""

import os
import threading

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from copyengine.checkpoint import dummy
from copyengine.checkpoint.dummy import CONSTANT, fill_dummy_experts
from copyengine.wire.errors import RequestRefused
from kernels.formats import FORMATS, ExpertFormat, RecordLayout, layout
from kernels.grouped_gemm.ref import matrices

HIDDEN, INTERMEDIATE = 64, 96
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Banks = list[NDArray[np.uint8]]


def kind_of(format_name: str) -> ExpertFormat:
    return ExpertFormat(format_name, block=(5, 7) if format_name == "fp8_block" else (0, 0))


def filled(record: RecordLayout, layers: int, experts: int, seed: int = 3) -> Banks:
    banks = [np.full((experts, record.record_nbytes), 0, np.uint8) for _ in range(layers)]
    heard: list[int] = []
    fill_dummy_experts(record, banks, seed, heard.append)
    assert sum(heard) == sum(bank.nbytes for bank in banks)
    return banks


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("layers", "experts"), [(0, 3), (1, 1), (1, 5), (3, 129)])
def test_one_layer_is_drawn_and_the_others_are_its_copies(format_name: str, layers: int, experts: int) -> None:
    record = layout(kind_of(format_name), HIDDEN, INTERMEDIATE)
    banks = filled(record, layers, experts)
    assert all(np.array_equal(bank, banks[0]) for bank in banks)
    if layers:
        assert len({row.tobytes() for row in banks[0]}) == experts


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_seed_alone_decides(format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of threads and the size of the pieces."""
    record = layout(kind_of(format_name), HIDDEN, INTERMEDIATE)
    first = filled(record, 2, 7)
    assert not np.array_equal(filled(record, 1, 7, seed=4)[0], first[0])
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setattr(dummy, "PIECE_NBYTES", 1)
    assert np.array_equal(filled(record, 2, 7)[1], first[1])


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_size_of_the_elements(format_name: str) -> None:
    """1/sqrt(fan-in) for each projection, of what the reference grouped GEMM reads; nothing into CONSTANT."""
    record = layout(kind_of(format_name), HIDDEN, INTERMEDIATE)
    (bank,) = filled(record, 1, 128)
    parts = [matrices(row, record, DTYPES.get(format_name, torch.float32)) for row in torch.from_numpy(bank)]
    gate_up = torch.stack([part[0] for part in parts]).float()
    down = torch.stack([part[1] for part in parts]).float()
    assert not down[:, CONSTANT].any()
    for matrix, fan_in in ((gate_up[:, :INTERMEDIATE], HIDDEN), (gate_up[:, INTERMEDIATE:], HIDDEN)):
        assert abs(matrix.std() * fan_in**0.5 - 1) < 0.05 and abs(matrix.mean()) < 0.01
    assert abs(down[:, 1:].std() * INTERMEDIATE**0.5 - 1) < 0.05


def test_nvfp4_has_every_code_and_finite_scales() -> None:
    record = layout("nvfp4", HIDDEN, INTERMEDIATE)
    (bank,) = filled(record, 1, 64)
    for name in ("gate_up", "down"):
        codes, scales, factors = (_bytes_of(bank, record, f"{name}{part}") for part in ("", "_scale", "_global"))
        assert {*np.unique(codes & 0xF), *np.unique(codes >> 4)} == set(range(16))
        values = torch.from_numpy(scales).view(torch.float8_e4m3fn).float()
        assert values.min() == 0.5 and values.max() == 1.875
        factors = factors.view("<f4")
        assert np.isfinite(factors).all() and (factors > 0).all() and len(np.unique(factors)) == factors.size


@pytest.mark.parametrize("format_name", ["fp8_block", "fp8_tensor", "mxfp4"])
def test_other_codes_and_scales_are_numbers(format_name: str) -> None:
    """Decoded by the reference: everything finite, no scale 0, and biases where there are any, but for CONSTANT's."""
    record = layout(msgspec.structs.replace(kind_of(format_name), bias=True), HIDDEN, INTERMEDIATE)
    (bank,) = filled(record, 1, 16)
    for row in torch.from_numpy(bank):
        assert all(torch.isfinite(matrix).all() for matrix in matrices(row, record, torch.float32))
    for name in ("gate_up", "down"):
        scales = _bytes_of(bank, record, f"{name}_scale")
        assert (scales > 100).all() if format_name == "mxfp4" else (scales.view("<f4") > 0).all()
        bias = _bytes_of(bank, record, f"{name}_bias").view("<f4")
        assert bias.any() and np.abs(bias).max() < 1
    assert not bias[:, CONSTANT].any()


def _bytes_of(bank: NDArray[np.uint8], record: RecordLayout, name: str) -> NDArray[np.uint8]:
    """[E, field.nbytes], contiguous."""
    field = record.field(name)
    return bank[:, field.offset : field.offset + field.nbytes].copy()


@pytest.mark.parametrize("stop_at", [1, 6, 20])
def test_what_hears_of_the_bytes_can_end_it(stop_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the exception, pieces of which there are 2,400, no more end than threads had in hand."""
    monkeypatch.setattr(dummy, "PIECE_NBYTES", 1)
    monkeypatch.setattr(dummy, "MAX_THREADS", 3)
    record = layout("bfloat16", HIDDEN, INTERMEDIATE)
    banks = [np.zeros((12, record.record_nbytes), np.uint8) for _ in range(200)]
    lock, heard = threading.Lock(), 0

    def on_bytes(nbytes: int) -> None:
        nonlocal heard
        with lock:
            heard += 1
            if heard >= stop_at:
                raise RequestRefused("stopping", "told to")

    with pytest.raises(RequestRefused):
        fill_dummy_experts(record, banks, 0, on_bytes)
    assert stop_at <= heard < stop_at + 3
