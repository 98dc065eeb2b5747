"""Where HTTP is served and with which key, against what the system makes of the address."""

import socket
from pathlib import Path

import pytest

from copyengine.wire.errors import ConfigError
from scheduler.http.listening import is_loopback, open_listener, reachable_url, read_key, url


def test_a_listener_takes_connections_and_keeps_its_port_to_itself() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        socket.create_connection(address, timeout=5).close()
        with pytest.raises(ConfigError, match=rf"cannot serve HTTP on http://127.0.0.1:{address[1]}: .*--http-port"):
            open_listener("127.0.0.1", address[1])
    open_listener("127.0.0.1", address[1]).close()


def test_a_port_is_free_again_at_once_after_connections_of_its_server() -> None:
    """As after a front that died: its connections would keep the port for a minute."""
    with open_listener("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        client = socket.create_connection(address, timeout=5)
        listener.setblocking(True)
        accepted, _ = listener.accept()
        accepted.close()  # the server's side first
    client.close()
    open_listener("127.0.0.1", address[1]).close()


@pytest.mark.parametrize("host", ["example.invalid", "a" * 300, "not an address", "256.1.1.1"])
def test_a_host_that_is_none_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match="--http-host"):
        open_listener(host, 0)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_which_addresses_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


def test_addresses_as_clients_write_them() -> None:
    assert reachable_url("0.0.0.0", 80) == "http://127.0.0.1:80" and reachable_url("::", 80) == "http://[::1]:80"
    assert url("127.0.0.1", 80) == "http://127.0.0.1:80" and url("::1", 80) == "http://[::1]:80"


def test_keys(tmp_path: Path) -> None:
    assert read_key("") == b"" and read_key("abc") == b"abc"
    file = tmp_path / "key"
    for content in (b"abc", b"abc\n", b" abc \r\n"):
        file.write_bytes(content)
        assert read_key(f"@{file}") == b"abc"


@pytest.mark.parametrize(
    "content", [b"", b"\n \n", b"two words", b"two\nlines", "käse".encode(), b"x" * 5000, b"a\x00b"]
)
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key @") as refused:
        read_key(f"@{file}")
    assert "words" not in str(refused.value) and "lines" not in str(refused.value), "a key is no text for a log"


@pytest.mark.parametrize("name", ["@", "@nowhere", "@."])
def test_a_file_that_cannot_be_read_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--api-key {name}: cannot be read: "):
        read_key(name)
