"""A model behind an API, in the policy's place. Light to import: a configuration error must cost nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from clawhpc.api.settings import Prices, check_url, read_key
from clawhpc.errors import at_least

EndpointProtocol = Literal["openai", "anthropic"]
"""Chat Completions, or Messages."""


@dataclass(frozen=True, kw_only=True)
class EndpointSettings(Prices):
    """A model at an endpoint, how it is asked, and what it costs.

    Where `WorkerSpec.endpoint.is_set`, a worker has an `EndpointDesk` in place of a `PolicyDesk`: no engine is started,
    and no policy folder is looked for. What it collects is text only, with the model's name in `CallRecord.model`.
    """

    protocol: EndpointProtocol = "openai"
    base_url: str | None = None
    """Where the API begins: `https://HOST/v1` for openai, `https://HOST` for anthropic. None: no endpoint is asked."""
    model: str | None = None
    """As the endpoint calls it."""
    api_key_env: str | None = None
    """Name of the environment variable in which a worker finds the key; None: the endpoint wants none."""
    proxy: str | None = None
    """HTTP proxy through which the endpoint is reached, where there is no other way out."""
    max_concurrency: int = 8
    """Requests of one worker at a time."""
    timeout_s: float = 300.0
    """Without an answer for so long, a request is given up, and sent again."""
    max_retries: int = 5
    """Of one request that finds the endpoint overloaded, failing or out of reach. Within the rollout's own time."""
    max_tokens_field: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    """How openai endpoints call the bound of a reply: its own models know the one, some other servers the other."""
    leave_out: tuple[str, ...] = ()
    """Request fields that the model refuses, such as `temperature` or `seed`: they are not sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol not in get_args(EndpointProtocol):
            raise ValueError(f"protocol={self.protocol!r}: allowed are {', '.join(get_args(EndpointProtocol))}")
        if bool(self.base_url) != bool(self.model):
            missing = "base_url" if self.model else "model"
            raise ValueError(f"endpoint.{missing} is missing: an endpoint needs base_url and model")
        for name, url in (("endpoint.base_url", self.base_url), ("endpoint.proxy", self.proxy)):
            if url:
                check_url(name, url)
        at_least(self, max_concurrency=1, timeout_s=0.001, max_retries=0)

    @property
    def is_set(self) -> bool:
        """The endpoint answers, not a policy."""
        return bool(self.model)

    def key(self, setting: str, environment: Mapping[str, str]) -> str | None:
        """What opens it; None where it wants none. UserError, by the `setting` that holds these, without one."""
        if self.api_key_env is None:
            return None
        return read_key(f"{setting}.api_key_env", self.api_key_env, environment)
