"""Banks against the layout they are told; nothing is left of a failed allocation."""

from pathlib import Path

import pytest

from copyengine.banks import Banks
from copyengine.device.host import reclaim_stale
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
    banks = Banks("run", layers, experts, 256, told.append)
    assert banks.nbytes == layers * experts * 256 == sum(told)
    assert [run.shape for run in banks.runs] == [(experts * 256,)] * layers
    for run, records in zip(banks.runs, banks.records, strict=True):
        assert records.shape == (experts, 256)
        records[-1] = 7
        assert run[-256:].tolist() == [7] * 256 and not run[:-256].any()
    assert len(entries(ledger)) == layers
    banks.close()
    banks.close()
    assert entries(ledger) == []


def test_too_much_leaves_nothing(ledger: Path) -> None:
    with pytest.raises(ConfigError, match=str(1 << 50)):
        Banks("run", 1, 1 << 20, 1 << 30, lambda _: None)
    assert entries(ledger) == []


def test_a_stop_in_the_middle_leaves_nothing(ledger: Path) -> None:
    def stop(_: int) -> None:
        raise RequestRefused("stopping", "")

    with pytest.raises(RequestRefused):
        Banks("run", 3, 4, 256, stop)
    assert entries(ledger) == [] and reclaim_stale() == []
