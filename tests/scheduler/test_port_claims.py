"""Claims of ports, in one process: the system tells apart who opened a lock's file, not which process did."""

from pathlib import Path
from typing import Any

import pytest

from copyengine.wire.errors import ConfigError
from scheduler.config import LaunchConfig
from scheduler.port_claims import claimed_ports


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("scheduler.port_claims.ledger.directory", lambda: tmp_path)
    return tmp_path


def ports(port: int, http_port: int | None = None, **others: Any) -> LaunchConfig:
    return LaunchConfig(port=port, http_port=http_port, **others)


@pytest.mark.parametrize(
    ("second", "flag"),
    [
        (ports(7001), "--port"),
        (ports(7003, 7002), "--http-port"),
        (ports(7002), "--port"),
        (ports(7001, host="localhost"), "--port"),
    ],
)
def test_a_port_is_claimed_once_and_free_again_afterwards(second: LaunchConfig, flag: str) -> None:
    with (
        claimed_ports(ports(7001, 7002)),
        pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:700\d: .* choose another {flag}$"),
        claimed_ports(second),
    ):
        raise AssertionError("it was claimed twice")
    with claimed_ports(second), claimed_ports(ports(7004)):
        pass


def test_others_ports_and_addresses_and_ports_that_the_system_chooses_do_not_meet() -> None:
    with (
        claimed_ports(ports(7001, 0)),
        claimed_ports(ports(7005, 0)),
        claimed_ports(ports(7001, host="127.0.0.2")),
        claimed_ports(ports(0, None)),
        claimed_ports(ports(0, 7001, http_host="::/1")),
    ):
        pass


def test_a_claim_that_fails_leaves_none() -> None:
    with claimed_ports(ports(7002)):
        with pytest.raises(ConfigError), claimed_ports(ports(7001, 7002)):
            pass
        with claimed_ports(ports(7001)):
            pass


def test_one_port_for_both_is_refused() -> None:
    with pytest.raises(ConfigError, match="--http-port 7001: is --port's"), claimed_ports(ports(7001, 7001)):
        pass


def test_where_no_lock_can_be_made_nothing_is_refused(directory: Path) -> None:
    (directory / "ports").write_text("", "utf-8")
    with claimed_ports(ports(7001)), claimed_ports(ports(7001)):
        pass
