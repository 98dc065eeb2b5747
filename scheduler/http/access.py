"""Who is served: who brings the key, if one is asked for; else, on loopback, whoever is no other site's page."""

import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from scheduler.http.errors import ApiError
from scheduler.http.front import Route
from scheduler.http.listening import is_loopback

MAX_SHOWN_CHARS = 100
"""Of a header that is quoted in the refusal of its request."""


class Access:
    """With a `key`, guarded routes are for who brings it.

    Without one, on loopback, a page of another site must not reach the engine through the browser of this machine's
    user: neither from its own address, which Origin tells, nor by having its name stand for this machine, which Host
    tells. With a key it could not, and a proxy in front of us may send any Host.
    """

    def __init__(self, host: str, key: bytes) -> None:
        """`host` is what HTTP is served on."""
        self._key = key
        self._host = host.lower()
        self._local = not key and is_loopback(host)

    def check(self, route: Route, headers: Headers) -> None:
        """ApiError 401 or 403 for who is not served."""
        if self._local:
            self._check_name("Host", f"//{headers.get('host', self._host)}")
            self._check_name("Origin", headers.get("origin", f"//{self._host}"))
        elif self._key and route.guarded:
            self._check_key(headers.get("authorization", ""))

    def _check_name(self, header: str, address: str) -> None:
        try:
            name = (urlsplit(address).hostname or "").rstrip(".")
        except ValueError:
            name = ""
        if name != self._host and not is_loopback(name):
            text = f"{header} names {name[:MAX_SHOWN_CHARS]!r}, which is not this machine; --api-key allows others"
            raise ApiError(403, "permission_error", text, code="foreign_host")

    def _check_key(self, authorization: str) -> None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key):
            return
        text = "a key is needed, and this is not it" if key else "send the key as Authorization: Bearer KEY"
        error = ApiError(401, "authentication_error", text, code="invalid_api_key")
        error.headers["www-authenticate"] = "Bearer"
        raise error
