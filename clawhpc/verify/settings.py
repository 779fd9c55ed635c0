"""How workspaces are scored, beyond what their tasks say. Light to import: a configuration error must cost nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from clawhpc.api.settings import Prices, check_url, read_key
from clawhpc.errors import UserError, at_least
from clawhpc.records import TEARDOWN_S, Limits, TaskSpec

EXAMPLE = "verify.judge.models={mine: {name: NAME, base_url: 'https://HOST/v1'}}"
"""On the command line, in quotes."""


@dataclass(frozen=True, kw_only=True)
class JudgeModel(Prices):
    """A model behind any OpenAI-compatible endpoint, and what it costs."""

    name: str
    """As the endpoint calls it."""
    base_url: str
    """Where the API begins: `https://HOST/v1`; the judge of a worker asks `BASE_URL/chat/completions`."""
    api_key_env: str | None = None
    """Name of the environment variable in which a worker finds the key; None: the endpoint wants none."""
    proxy: str | None = None
    """HTTP proxy through which the endpoint is reached, where there is no other way out."""
    temperature: float | None = 0.0
    """None: not sent, for models that refuse it."""
    max_tokens: int = 4096
    """Of one reply, what a model thinks before it answers included."""
    max_tokens_field: Literal["max_completion_tokens", "max_tokens"] = "max_tokens"
    """How the endpoint calls that bound: most know this one; OpenAI's own models the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url("base_url", self.base_url)
        if self.proxy is not None:
            check_url("proxy", self.proxy)
        at_least(self, max_tokens=1, **({} if self.temperature is None else {"temperature": 0.0}))


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """Who scores by a task's rubric, and what is shown to them."""

    models: dict[str, JudgeModel] = field(default_factory=dict)
    """By a name of yours. Each gives its opinion; the score is their mean. None: tasks with a rubric are refused."""
    repeats: int = 1
    """Opinions of each model. At temperature 0 they hardly differ."""
    request_s: float = 60.0
    """For one answer. `limits.reserve_s` must have room for it."""
    max_attempts: int = 3
    """How often one opinion is asked for, where the endpoint is overloaded or failing, or the answer cannot be read."""
    backoff_s: float = 1.0
    """Wait before the second attempt, doubled for each later one. An endpoint's own Retry-After wins."""
    max_file_bytes: int = 16_000
    """Shown of one file: its head and its tail."""
    max_workspace_bytes: int = 100_000
    """Shown of all files together, as JSON. Files that the task did not bring come first. Less where a judge's window
    does not hold as much: see `judge.SHARES`.
    """
    final_reply: bool = True
    """Show what the policy said last, too."""

    def __post_init__(self) -> None:
        at_least(self, repeats=1, request_s=0.001, max_attempts=1, backoff_s=0)
        at_least(self, max_file_bytes=100, max_workspace_bytes=100)


@dataclass(frozen=True, kw_only=True)
class ShapingSettings:
    """What trains, made of the raw reward r; with these defaults it is r itself.

    s = 1 where r >= threshold, else partial_credit * r; the shaped reward is (1 - format_penalty) * s
    + format_penalty * (1 - m), where m is the share of answered calls with a tool call that nobody could run.
    """

    threshold: float = 1.0
    """From this raw reward on, all of it counts as won."""
    partial_credit: float = 1.0
    """What a raw reward below the threshold is multiplied by; 0: all or nothing."""
    format_penalty: float = 0.0
    """What a rollout loses all of whose calls are malformed."""

    def __post_init__(self) -> None:
        for name in ("threshold", "partial_credit", "format_penalty"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)}: must be from 0 to 1")
        if self.threshold == 0.0:
            raise ValueError("threshold=0.0: must be more than 0, or every rollout has won")


@dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """How workspaces are scored."""

    judge: JudgeSettings = field(default_factory=JudgeSettings)
    shaping: ShapingSettings = field(default_factory=ShapingSettings)


def judge_keys(settings: JudgeSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """The API keys that the judges need, by name of their variable. UserError when one is not set."""
    return {
        model.api_key_env: read_key(f"verify.judge.models.{label}.api_key_env", model.api_key_env, environment)
        for label, model in settings.models.items()
        if model.api_key_env is not None
    }


def check_rubrics(tasks: Iterable[TaskSpec], settings: JudgeSettings, limits: Limits) -> None:
    """UserError for the first task that needs a judge where there is none, or no time for one."""
    task = next((task for task in tasks if task.verifier.rubric is not None), None)
    if task is None:
        return
    if not settings.models:
        raise UserError(f"task {task.task_id} has a rubric, and there is no judge to score by it: set {EXAMPLE}")
    least_s = limits.settle_s + settings.request_s + TEARDOWN_S
    if limits.reserve_s < least_s:
        raise UserError(
            f"limits.reserve_s={limits.reserve_s:g}: must be at least {least_s:g} for the judge of task "
            f"{task.task_id}: limits.settle_s={limits.settle_s:g}, verify.judge.request_s={settings.request_s:g}, "
            f"and {TEARDOWN_S:g} s for teardown"
        )
