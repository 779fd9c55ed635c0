"""One request to an API, bounded in time and in bytes.

The other side may be slow, byte by byte, or endless, or repeat what opens it, or lead elsewhere. So a request has one
deadline, from its first byte to the last of its answer; an answer has a most, and is not unpacked; no redirect is
followed, for it would take the key to another host; and no message holds the key. Nothing is taken from the
environment: neither proxies nor certificates.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from types import TracebackType

import anyio
import httpx2

MAX_ANSWER_BYTES = 16 * 2**20
"""A hundred times what any model says in one reply."""
MAX_WORDS = 500
"""Characters of an endpoint's own words that are passed on."""
PASSING = frozenset({408, 409, 425, 429})
"""Statuses that say nothing of the request, beside all of the server's own failures."""


class NoAnswer(Exception):
    """A request without a whole answer; the same may be sent again. The message is one line, without the key."""


@dataclass(frozen=True, kw_only=True)
class ApiAnswer:
    """What came back, whole."""

    status: int
    headers: Mapping[str, str]
    """By names in any case."""
    content: bytes

    @property
    def is_ok(self) -> bool:
        """It is an answer to what was asked."""
        return self.status == httpx2.codes.OK

    @property
    def passes(self) -> bool:
        """It says that the endpoint is overloaded or failing: the same may be sent again."""
        return self.status in PASSING or self.status >= httpx2.codes.INTERNAL_SERVER_ERROR

    def retry_after_s(self, now: float) -> float | None:
        """How long the endpoint would have us wait, in either form of the header; None where it does not say.

        `now`: seconds since the epoch.
        """
        said = self.headers.get("retry-after", "")
        try:
            seconds = float(said)
        except ValueError:
            try:
                seconds = parsedate_to_datetime(said).timestamp() - now
            except ValueError:
                return None
        return max(0.0, seconds) if math.isfinite(seconds) else None


class Api:
    """The way to one API, for all requests of a worker. An async context manager; one per event loop."""

    def __init__(
        self,
        url: str,
        key: str | None,
        headers: Mapping[str, str],
        *,
        proxy: str | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`url`: of all requests. `headers`: with the `key`, where there is one, in the protocol's own."""
        self.url, self._key = url, key
        self._http = httpx2.AsyncClient(
            headers={"content-type": "application/json", "accept-encoding": "identity", **headers},
            proxy=proxy,
            transport=transport,
            verify=certificates(),
            timeout=None,
            trust_env=False,
        )

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def post(self, body: bytes, *, timeout_s: float) -> ApiAnswer:
        """The whole answer, whatever its status. Raises `NoAnswer` where there is none within `timeout_s`."""
        try:
            with anyio.fail_after(timeout_s):
                async with self._http.stream("POST", self.url, content=body) as response:
                    content = await _read(response)
        except TimeoutError as error:
            raise NoAnswer(f"no answer within {timeout_s:g} s") from error
        except httpx2.RequestError as error:
            raise NoAnswer(self.words(f"{type(error).__name__}: {error}")) from error
        return ApiAnswer(status=response.status_code, headers=response.headers, content=content)

    def words(self, text: str) -> str:
        """Of the endpoint's, on one line, shortened; never the key, which some repeat."""
        text = text.replace(self._key, "***") if self._key else text
        return " ".join(text.split())[:MAX_WORDS]


async def _read(response: httpx2.Response) -> bytes:
    """The body. `NoAnswer` for one that is packed, which nobody has asked for, or has no end."""
    if (packed := response.headers.get("content-encoding", "identity")) != "identity":
        raise NoAnswer(f"an answer with content-encoding {packed[:40]!r}, though none was asked for")
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            raise NoAnswer(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(content)


@cache
def certificates() -> ssl.SSLContext:
    """Those of the system. Loading them takes 60 ms, so once for all."""
    return httpx2.create_ssl_context(trust_env=False)
