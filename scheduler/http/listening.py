"""Where the front listens and what key it asks for: what a start can be refused for."""

import ipaddress
import socket
import sys
from pathlib import Path

from copyengine.wire.errors import ConfigError

BACKLOG = 1024
"""Connections that the system keeps until they are taken, such as those that come while the tokenizer is read."""

SEND_BUFFER_NBYTES = 256 * 2**10
"""What the system holds of answers for a client that does not read, beyond what we hold."""

KEEPALIVE_IDLE_S = 60
"""Seconds of silence after which the system asks whether a client's machine is still there."""

MAX_KEY_NBYTES = 4096
"""Of the file that --api-key names: a longer one is another file, such as a log that grows."""


def open_listener(host: str, port: int) -> socket.socket:
    """A socket bound to the address and listening. ConfigError if that is not possible, naming the flag."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        if sys.platform != "win32":  # there it would let two processes have the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_NBYTES)
        _notice_the_lost(listener)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        raise ConfigError(_refusal(host, port, error)) from None
    return listener


def _notice_the_lost(listener: socket.socket) -> None:
    """Have the system end connections whose other end is gone without a word; what is accepted inherits it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)


def _refusal(host: str, port: int, error: OSError | UnicodeError) -> str:
    why = error.strerror if isinstance(error, OSError) else "is no host name"
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"--http-host {host}: {why}; give an address of this machine, such as 127.0.0.1"
    return f"cannot serve HTTP on {url(host, port)}: {why}; choose another --http-port or --http-host"


def url(host: str, port: int) -> str:
    """How a client names the address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reachable_url(host: str, port: int) -> str:
    """The same from this machine: an address that stands for all is reached by loopback's."""
    return url({"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host), port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_key(stated: str) -> bytes:
    """The key that `stated` is, or names with @FILE; empty if none is asked for. ConfigError if it is no key."""
    if not stated:
        return b""
    where, key = "--api-key", stated.encode()
    if stated.startswith("@"):
        where = f"--api-key {stated}"
        key = _file(stated[1:], where).strip()
    if not key:
        raise ConfigError(f"{where}: is empty; write a key into it, or leave --api-key out")
    if len(key) > MAX_KEY_NBYTES or not all(33 <= byte <= 126 for byte in key):
        raise ConfigError(f"{where}: a key is one word of at most {MAX_KEY_NBYTES} ASCII characters without blanks")
    return key


def _file(name: str, where: str) -> bytes:
    try:
        with Path(name).open("rb") as file:
            return file.read(MAX_KEY_NBYTES + 3)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "is no file name"
        raise ConfigError(f"{where}: cannot be read: {why}") from None
