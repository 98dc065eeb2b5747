"""Ports that a start has for itself, from before it looks whether they are free until its engine has ended.

Between that look and the processes that listen lie seconds, in which another start would find them free as well.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import quote

from filelock import FileLock, Timeout

from copyengine.device import ledger
from copyengine.wire.errors import ConfigError
from scheduler.config import LaunchConfig


@contextmanager
def claimed_ports(config: LaunchConfig) -> Iterator[None]:
    """Inside, no other start of this user on this machine has a port that `config` names, on a host of the same name.

    ConfigError if one has it already, or if `config` names one port twice. A claim is a lock on an empty file beside
    the ledger of shared memory, which the system drops with its process. Where none can be made, such as on a full
    disk, who listens first has the port.
    """
    if config.port and config.port == config.http_port:
        raise ConfigError(f"--http-port {config.http_port}: is --port's; choose another")
    with ExitStack() as claims:
        for flag, host, port in (
            ("--port", config.host, config.port),
            ("--http-port", config.http_host, config.http_port),
        ):
            if port:
                _claim(claims, "127.0.0.1" if host == "localhost" else host, port, flag)
        yield


def _claim(claims: ExitStack, host: str, port: int, flag: str) -> None:
    try:
        directory = ledger.directory() / "ports"
        directory.mkdir(mode=0o700, exist_ok=True)
        claims.enter_context(FileLock(directory / f"{quote(host, safe='')}-{port}.lock", timeout=0))
    except Timeout:
        taken = f"cannot listen on {host}:{port}: another engine has it or starts there"
        raise ConfigError(f"{taken}; choose another {flag}") from None
    except (OSError, NotImplementedError, ConfigError):
        return
