"""What is known of a rollout that is still running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from clawhpc.errors import BoundaryError, boundary
from clawhpc.mcp.traffic import Traffic
from clawhpc.records import CallRecord, ExecResult, Timings, Verdict
from clawhpc.wire.base import ContextOverflow


@dataclass
class Trace:
    """What is known so far about a rollout that is still running."""

    calls: tuple[CallRecord, ...] = ()
    limit: str | None = None
    limit_detail: str = ""
    overflow: ContextOverflow | None = None
    """The last prompt that did not fit the window."""
    exec_result: ExecResult | None = None
    verdict: Verdict | None = None
    mcp: Traffic | None = None
    """Of its MCP servers on the host."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> wall seconds."""

    @contextmanager
    def phase(self, name: str, kind: type[BoundaryError], deadline: float) -> Iterator[None]:
        """Time one phase, bound it by `deadline`, and classify what escapes from it as `kind`."""
        start = anyio.current_time()
        try:
            with boundary(kind, name), anyio.fail_after(max(0.0, deadline - start)):
                yield
        except kind as error:
            if isinstance(error.__cause__, TimeoutError) and anyio.current_time() >= deadline:
                raise kind(f"{name}: the deadline of the rollout passed") from error
            raise
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + anyio.current_time() - start

    def timings(self, started_at: float) -> Timings:
        """Seconds of each phase that was reached."""
        phases = ("boot", "run", "settle", "verify", "teardown")
        return Timings(
            started_at=started_at,
            **{f"{name}_s": self.seconds.get(name, 0.0) for name in phases},
            harness_cpu_s=self.exec_result.cpu_s if self.exec_result else 0.0,
        )
