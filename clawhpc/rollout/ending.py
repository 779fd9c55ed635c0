"""How a rollout has ended: what is the policy's doing, and what is not."""

from __future__ import annotations

from clawhpc.errors import BoundaryError, EngineError, ProxyError, SandboxError, VerifierError
from clawhpc.proxy.respond import Responder
from clawhpc.proxy.session import CANCELLED
from clawhpc.records import CallRecord, Outcome
from clawhpc.rollout.trace import Trace

OUTCOME_OF: dict[type[BoundaryError], Outcome] = {
    SandboxError: Outcome.SANDBOX_FAILED,
    EngineError: Outcome.ENGINE_FAILED,
    ProxyError: Outcome.PROXY_FAILED,
    VerifierError: Outcome.VERIFIER_FAILED,
}
"""Which part of the machine failed -> how the rollout is recorded."""
ENGINE_CHECK_S = 5.0
"""An engine that draws at all answers somebody within this time, or draws one more token."""
FIRST_REPLY_SHARE = 0.5
"""Of the time that a harness has: a first reply that was drawn for longer has no end. A later one began late."""


def outcome_of(error: BoundaryError) -> Outcome:
    """How a rollout is recorded that `error` has ended, by the part that failed."""
    return next(outcome for kind, outcome in OUTCOME_OF.items() if isinstance(error, kind))


async def check_engine(trace: Trace, responder: Responder) -> None:
    """Raise EngineError where the time ran out that the engine took: it hangs, or was lost on the way.

    Where it draws, calls that were left without an answer were long: a policy that does not come to an end has its
    timeout, and learns from it.
    """
    incidents = [incident for call in trace.calls for incident in call.incidents]
    if incidents and trace.exec_result is not None and trace.exec_result.timed_out:
        raise EngineError(f"the harness ran out of time, some of which the engine took: {'; '.join(incidents)[:500]}")
    if cancelled_calls(trace):
        await responder.check_drawing(within_s=ENGINE_CHECK_S)


def cancelled_calls(trace: Trace) -> list[CallRecord]:
    """Those that were still open when the harness had ended."""
    return [call for call in trace.calls if call.failure == CANCELLED]


def check_machine(trace: Trace, most_s: float) -> None:
    """Raise where no call was answered and that is not the policy's doing: its reward would be a lie.

    `most_s`: that the harness had. EngineError for a window in which not even the first prompt fits, SandboxError for a
    harness that ended before, or whose requests were all refused. A first reply that was drawn until the time was up is
    the policy's doing.
    """
    if any(call.reply is not None for call in trace.calls):
        return
    if trace.overflow is not None:
        raise EngineError(f"engine.max_model_len is too small for the first prompt of the harness: {trace.overflow}")
    result, endless_s = trace.exec_result, FIRST_REPLY_SHARE * most_s
    endless = any(call.duration_s > endless_s for call in cancelled_calls(trace))
    if endless and (result is None or result.timed_out):
        return
    if result is None:
        raise SandboxError(f"the harness sent requests of which none was answered: {trace.limit_detail}")
    ended = "ran out of time" if result.timed_out else f"ended with exit code {result.exit_code}"
    ended = f"was ended ({result.exceeded})" if result.exceeded else ended
    reason = "; ".join(call.failure for call in trace.calls) or result.stderr_tail or result.stdout_tail
    raise SandboxError(f"the harness {ended} before a model call was answered: {reason.strip()[-500:]}")


def ending(trace: Trace) -> tuple[Outcome, str]:
    """How a rollout ended in which every part did its work, and why, for a person."""
    if trace.limit is not None:
        return Outcome.LIMIT, trace.limit_detail
    result = trace.exec_result
    assert result is not None, "without a limit or a failure the harness has run to its end"
    if result.exceeded:
        return Outcome.LIMIT, result.exceeded
    if result.timed_out:
        return Outcome.TIMEOUT, f"the harness was stopped after {result.wall_s:.0f} s"
    if result.exit_code != 0:
        return Outcome.HARNESS_EXIT, f"exit code {result.exit_code}: {result.stderr_tail.strip()[-500:]}"
    return Outcome.COMPLETED, ""
