"""Where an API is, what opens it, and what it costs. Light to import: a configuration error must cost nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from clawhpc.errors import UserError, at_least
from clawhpc.records import Usage

MILLION = 1_000_000
URL = re.compile(r"https?://([a-z\d.-]*[a-z\d]|\[[a-f\d:.]+\])(:\d{1,5})?(/[^\s?#@]*)?", re.IGNORECASE | re.ASCII)
"""Scheme, host, port and path. What else a URL may hold are secrets and queries, which would stand in every message."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What a model costs, in USD for a million tokens. A part of its settings."""

    input_price: float | None = None
    """Of input tokens that are not cached; None: not known, and the cost neither."""
    cached_price: float | None = None
    """Of input tokens that the endpoint has in its cache; None: as others."""
    output_price: float | None = None
    """Of output tokens, reasoning included; None: not known, and the cost neither."""

    def __post_init__(self) -> None:
        names = ("input_price", "cached_price", "output_price")
        at_least(self, **{name: 0.0 for name in names if getattr(self, name) is not None})

    @property
    def are_known(self) -> bool:
        """Whether costs can be told."""
        return self.input_price is not None and self.output_price is not None

    def cost_usd(self, usage: Usage) -> float:
        """Of `usage`, which counts the cached tokens among those of the input."""
        assert self.input_price is not None, "the prices are known"
        assert self.output_price is not None, "the prices are known"
        cached_price = self.input_price if self.cached_price is None else self.cached_price
        num_cached = min(usage.cached_tokens, usage.input_tokens)
        fresh_usd = (usage.input_tokens - num_cached) * self.input_price
        return (fresh_usd + num_cached * cached_price + usage.output_tokens * self.output_price) / MILLION


def check_url(name: str, url: str) -> None:
    """ValueError, by the `name` of its setting, for what is no plain URL."""
    if not URL.fullmatch(url) or not _has_port(url):
        raise ValueError(
            f"{name} must be http://HOST:PORT/PATH or https://HOST/PATH, and hold no user, key or query"
            + ("" if "@" in url or "?" in url else f": {url}")
        )


def _has_port(url: str) -> bool:
    """None, or one that there is."""
    try:
        return urlsplit(url).port != 0
    except ValueError:
        return False


def read_key(setting: str, variable: str, environment: Mapping[str, str]) -> str:
    """The key in `variable`: it is in no configuration, record or message. UserError, by its `setting`, without one.

    A key goes into a header, so that it is one line of printable ASCII; white space around it is what a shell has left.
    """
    key = environment.get(variable, "").strip()
    if key and key.isascii() and key.isprintable():
        return key
    fault = "what it holds is no line of ASCII" if key else "it is not set, or empty"
    raise UserError(f"{setting}={variable}: on {os.uname().nodename} this variable holds no key: {fault}")
