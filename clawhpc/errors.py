"""One failure class per boundary, and the rule which failures are data.

ClawError
├── UserError           bad input: the message names the file or key and what to do; ends the program, exit code 2
├── LaunchError         a collection or a worker failed for good; ends the program, exit code 1
├── HostError           nothing can be done on this host; ends its worker, whose work others do
└── BoundaryError       a part of the machine failed; recorded as an infrastructure `Outcome`, never as reward 0
    ├── SandboxError    -> sandbox_failed
    ├── EngineError     -> engine_failed
    ├── ProxyError      -> proxy_failed
    └── VerifierError   -> verifier_failed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ClawError(Exception):
    """Anything that clawhpc itself raises."""


class UserError(ClawError):
    """Bad input from a person. One line: what is wrong, in which file or key, and what to do."""


class LaunchError(ClawError):
    """Workers do not start, or keep dying, or do nothing. The message names the log to read."""


class HostError(ClawError):
    """A part does not start on this host, however often it is tried; on another one it may. The message says which."""


class BoundaryError(ClawError):
    """A part failed that is neither the policy nor the user. Subclasses say which part."""


class SandboxError(BoundaryError):
    """The sandbox did not start, or could not be torn down."""


class EngineError(BoundaryError):
    """The engine died, refused a request that it must accept, or broke the token contract (laws 1 and 9)."""


class ProxyError(BoundaryError):
    """The proxy could not answer or record a call (ours to fix; what the policy does wrong is not one)."""


class VerifierError(BoundaryError):
    """The verifier failed, hung, or gave no reward in [0, 1]. The message ends with the tail of its output."""


@contextmanager
def boundary(kind: type[ClawError], what: str) -> Iterator[None]:
    """Classify whatever escapes the block as `kind`, with the original as its cause.

    A `ClawError` passes unchanged, so that the innermost boundary names the true cause; cancellation and
    `KeyboardInterrupt` are not `Exception`s and pass too. This is the one broad `except` that the house allows.
    """
    try:
        yield
    except ClawError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error


@contextmanager
def ungrouped() -> Iterator[None]:
    """One exception out of a task group comes out as itself; anyio always wraps it in a group.

    Of several at once the first `ClawError` or `OSError` stands for all: they are failures of one part, met by several
    tasks. Where there is none, the group is a bug and stays whole.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        known = [error for error in leaves if isinstance(error, (ClawError, OSError))]
        error = known[0] if known else leaves[0] if len(leaves) == 1 else group
        raise error from error.__cause__


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def at_least(settings: object, **bounds: float) -> None:
    """Raise ValueError that names the first field of `settings` below its bound, or not a number."""
    for name, least in bounds.items():
        value = getattr(settings, name)
        if not least <= value < float("inf"):
            raise ValueError(f"{name}={value}: must be at least {least:g}")
