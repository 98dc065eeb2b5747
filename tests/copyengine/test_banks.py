"""Banks against the layout they are told; nothing is left of a failed allocation."""

from pathlib import Path

import pytest

from copyengine.banks import Banks
from copyengine.device.host import HostCopyDevice, reclaim_stale
from copyengine.wire.errors import ConfigError, RequestRefused


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def entries(ledger: Path) -> list[Path]:
    return [path for directory in ledger.glob("slotstream-*") for path in directory.iterdir()]


@pytest.mark.parametrize(("layers", "experts"), [(0, 0), (1, 1), (3, 127), (2, 128), (2, 129)])
def test_exactly_as_many_bytes_as_records(ledger: Path, layers: int, experts: int) -> None:
    """The two views are of the same bytes: writing a record shows in the run at its place."""
    told: list[int] = []
    banks = Banks(HostCopyDevice(), "run", layers, experts, 256, told.append)
    assert banks.nbytes == layers * experts * 256 == sum(told)
    assert [(bank.nbytes, bank.array.shape) for bank in banks.banks] == [(experts * 256, (experts * 256,))] * layers
    for bank, records in zip(banks.banks, banks.records, strict=True):
        assert records.shape == (experts, 256)
        records[-1] = 7
        assert bank.array[-256:].tolist() == [7] * 256 and not bank.array[:-256].any()
    assert len(entries(ledger)) == layers
    banks.close()
    banks.close()
    assert entries(ledger) == []


def test_too_much_leaves_nothing(ledger: Path) -> None:
    with pytest.raises(ConfigError, match=str(1 << 50)):
        Banks(HostCopyDevice(), "run", 1, 1 << 20, 1 << 30, lambda _: None)
    assert entries(ledger) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_a_stop_in_the_middle_leaves_nothing(ledger: Path, threads: int) -> None:
    """Also where banks are allocated at the same time: those that are there already, and those that come later."""

    def stop(nbytes: int) -> None:
        told.append(nbytes)
        if len(told) == 2:
            raise RequestRefused("stopping", "")

    told: list[int] = []
    device = HostCopyDevice()
    device.bank_threads = threads
    with pytest.raises(RequestRefused):
        Banks(device, "run", 8, 4, 256, stop)
    assert entries(ledger) == [] and reclaim_stale() == []
