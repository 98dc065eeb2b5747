"""Who is served, by headers as browsers, proxies and other clients send them."""

import pytest
from starlette.datastructures import Headers
from starlette.responses import Response

from scheduler.http.access import Access
from scheduler.http.errors import ApiError
from scheduler.http.front import Call, Front, Route


async def nothing(front: Front, call: Call[None]) -> Response:
    return Response()


GUARDED = Route("GET", "/x", nothing, "")
OPEN = Route("GET", "/y", nothing, "", guarded=False)


def status(access: Access, route: Route = GUARDED, **headers: str) -> int:
    try:
        access.check(route, Headers(headers))
    except ApiError as error:
        assert error.body.error.message
        return error.status
    return 200


@pytest.mark.parametrize(
    ("host", "served"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("LOCALHOST.:8000", True),
        ("127.0.0.1:8000", True),
        ("127.1.2.3", True),
        ("[::1]:8000", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.1:8000", False),
        ("evil.example/@localhost", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_a_name_that_stands_for_this_machine_alone_lets_in(host: str, served: bool) -> None:
    """Without a key on loopback, also to what no key is asked for."""
    access = Access("127.0.0.1", b"")
    assert status(access, host=host) == status(access, OPEN, host=host) == (200 if served else 403)
    assert status(access, host="localhost", origin=f"http://{host}") == (200 if served else 403)


def test_pages_without_a_name_and_clients_without_a_host() -> None:
    access = Access("127.0.0.1", b"")
    assert status(access) == 200
    assert status(access, host="localhost", origin="null") == 403, "of a file, or of a page in a frame"


def test_the_name_that_is_listened_on_lets_in() -> None:
    assert status(Access("localhost", b""), host="localhost:1") == 200
    assert status(Access("127.0.0.9", b""), host="127.0.0.9:1") == 200


def test_where_others_are_served_any_name_lets_in() -> None:
    assert status(Access("0.0.0.0", b""), host="gpu.example", origin="http://gpu.example") == 200


def test_with_a_key_the_key_alone_counts() -> None:
    """A proxy on this machine hands on the name that its own clients use."""
    access = Access("127.0.0.1", b"k")
    assert status(access, host="gpu.example", authorization="Bearer k") == 200
    assert status(access, host="localhost") == 401 and status(access, OPEN, host="gpu.example") == 200


def test_the_refusal_names_the_header_and_what_it_says() -> None:
    for header in ("Host", "Origin"):
        headers = Headers({header: ("http://" if header == "Origin" else "") + "evil.example"})
        with pytest.raises(ApiError, match=rf"403 foreign_host: {header} names 'evil\.example'.*--api-key"):
            Access("127.0.0.1", b"").check(GUARDED, headers)
