"""Ports that a start has for itself, from before it looks whether they are free until its engine has ended.

Between that look and the processes that listen lie seconds, in which another start would find them free as well.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import quote

from filelock import FileLock, Timeout

from copyengine.checkpoint.builtin import cache_directory
from copyengine.wire.errors import ConfigError
from scheduler.config import LaunchConfig


@contextmanager
def claimed_ports(config: LaunchConfig) -> Iterator[None]:
    """Inside, no other start of this user has a port that `config` names. ConfigError if one has it already.

    A claim is a lock on an empty file beside the built-in model, which the system drops with its process. Where none
    can be made, such as in a directory without the right to write, who listens first has the port.
    """
    wanted = {(config.host, config.port): "--port", (config.http_host, config.http_port or 0): "--http-port"}
    with ExitStack() as claims:
        for (host, port), flag in wanted.items():
            if port:
                _claim(claims, host, port, flag)
        yield


def _claim(claims: ExitStack, host: str, port: int, flag: str) -> None:
    try:
        directory = cache_directory() / "ports"
        directory.mkdir(parents=True, exist_ok=True)
        claims.enter_context(FileLock(directory / f"{quote(host, safe='')}-{port}.lock", timeout=0))
    except Timeout:
        taken = f"cannot listen on {host}:{port}: another engine has it or starts there"
        raise ConfigError(f"{taken}; choose another {flag}") from None
    except (OSError, NotImplementedError, ConfigError):
        return
