"""One rollout's model calls: each is admitted, matched with what was drawn before, answered, and recorded.

A call lives on its own, not on the connection that asked for it. The same request that comes again while the call is
open joins it; after an answer that never reached the harness, it gets that answer: no reply is paid for twice because a
connection broke. The same request after a delivered answer is a new call.

A request is matched and numbered at once, in order of arrival. A long one is rendered in a thread, from what was known
when it was matched: the loop, which all rollouts of a worker share, goes on meanwhile.

An engine that is lost in mid-call is waited for, while the harness waits for its answer; then the reply is drawn again,
whole and from the same seed.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from clawhpc.engine.client import EngineLost
from clawhpc.errors import BoundaryError, EngineError, ProxyError, boundary
from clawhpc.proxy.record import CallMemory, OpenCall
from clawhpc.proxy.respond import Draw, Prompt, Responder, Response
from clawhpc.records import CallRecord, CallRole, Conversation, Limits
from clawhpc.wire.base import ContextOverflow, ErrorKind, FieldUnlisted, WireError, WireRequest

Classify = Callable[[Mapping[str, str], Conversation], tuple[CallRole, dict[str, str]]]
"""A harness adapter's reading of a call: (headers in lower case, conversation) -> role, and the headers it read."""

MAX_OVERFLOWS = 3
"""A harness compacts when a prompt does not fit; one that sends a third such prompt in a row is not helped by it."""
ANSWERS_THAT_HELP = 2
"""Of the main loop, before a prompt that does not fit is no longer in a row with the last one. A single answer may be
the compaction itself, which not every harness lets us tell from its main loop: some would compact for ever.
"""
MAX_IN_FLIGHT = 16
"""Calls of one rollout at a time. A harness asks for a few subagents at once; the engine and its host belong to all."""
REQUESTS_PER_CALL = 20
"""Requests of one rollout, for each call that it may make: retries, token counts and refused ones included. A harness
that sends more has gone mad, and would do so until its time is up.
"""
MAX_DRAWS = 2
"""Of one reply. A prompt that an engine dies of takes so many; a plan is allowed more starts, so that others go on."""
CANCELLED = "cancelled"
"""`CallRecord.failure` of a call that was still open when its session was settled."""
BYTES_PER_TOKEN = 64
"""More than a token of any text has. What has more than that for each token of the window does not fit, unread."""
ALWAYS_READ_BYTES = 2**20
"""However small the window: a request is not text alone."""
RENDERED_HERE_BYTES = 2**15
"""A shorter request is rendered in less than 40 ms, if nothing of it is known; a thread would not be worth it."""
CANCEL_S = 5.0
"""How long the engine has to let go of cancelled calls."""


class Session:
    """The calls of one rollout. All methods belong to one event loop; nothing here knows of HTTP."""

    limit: str | None = None
    """The limit that the rollout has reached: `calls`, `sampled_tokens`, `context` or `requests`."""
    limit_detail: str = ""
    """The same for a person, with its figures."""
    overflow: ContextOverflow | None = None
    """The last prompt that did not fit the window."""
    failure: BoundaryError | None = None
    """The first failure of a part behind the proxy: the true cause of what the harness then does."""

    def __init__(
        self,
        *,
        responder: Responder,
        classify: Classify,
        limits: Limits,
        seed: int,
        tasks: TaskGroup,
        now: Callable[[], float],
    ) -> None:
        self.base_path = f"/s/{secrets.token_urlsafe(32)}"
        """Unguessable; the harness's base URL ends with it."""
        self._responder, self._classify = responder, classify
        self._limits, self._seed = limits, seed
        self._tasks = tasks
        self.now = now
        """Seconds since the epoch."""
        self._request_prefix = secrets.token_hex(4)
        self._memory = CallMemory()
        self._undelivered: dict[tuple[object, ...], OpenCall] = {}
        self._in_flight: dict[int, OpenCall] = {}
        self._renderer = anyio.CapacityLimiter(1)
        """One thread for each session: no harness can keep more than that busy."""
        self.reading = anyio.Lock()
        """Held while a request is parsed. A fair one: between any two of this rollout the loop serves the others."""
        self._num_requests = self._num_calls = self._num_sampled = 0
        self._num_overflows = self._num_answers = 0
        """Overflows in a row, and answers to the main loop since the last one."""
        self.has_ended = False
        """Nothing is answered any more."""
        self._stopped = anyio.Event()

    def calls(self) -> tuple[CallRecord, ...]:
        """Every call that has ended, in order of arrival."""
        return self._memory.records

    async def wait_stopped(self) -> None:
        """Return when a limit is reached or a part has failed: the harness need not run on."""
        await self._stopped.wait()

    def fail_before_reply(self, error: BoundaryError) -> None:
        """A part that a harness needs from its first call on has failed. Once the policy has replied, what fails may be
        its doing, and the rollout goes on.
        """
        if not any(record.reply is not None for record in self.calls()):
            self._fail(error)

    def admit_request(self) -> None:
        """Count a request before it is read. Raises `WireError` after the end, and for far more than calls can need."""
        self._refuse_after_end()
        self._num_requests += 1
        if self._num_requests > REQUESTS_PER_CALL * self._limits.max_calls:
            self._reach("requests", f"{self._num_requests} for {self._num_calls} calls")
            raise self._limit_error()

    @property
    def max_bytes(self) -> float:
        """Of a request that may fit the window."""
        window = self._responder.context_window
        return math.inf if window is None else max(ALWAYS_READ_BYTES, BYTES_PER_TOKEN * window)

    def refuse_unread(self, num_bytes: int) -> None:
        """Raise `ContextOverflow` for a request of more than `max_bytes`. It counts as one that was read."""
        window = self._responder.context_window
        if window is not None and num_bytes > self.max_bytes:
            overflow = ContextOverflow(num_bytes // BYTES_PER_TOKEN, window)
            self._note_overflow(overflow)
            raise overflow

    def refuse_unlisted(self, request: WireRequest) -> None:
        """Raise `FieldUnlisted` for a request with a field that its table does not list: the rollout ends, for what the
        harness then does is not the policy's doing.
        """
        if request.unlisted:
            error = FieldUnlisted(request.unlisted[0])
            self._fail(ProxyError(f"a request has a field that no table lists, and strict_fields is set: {error.path}"))
            raise error

    async def open_call(
        self,
        *,
        protocol: str,
        request: WireRequest,
        headers: Mapping[str, str],
        num_bytes: int,
    ) -> OpenCall:
        """The call that answers this request, with its prompt: a new one, or that which the same request opened before.

        `num_bytes`: of the request. Raises `WireError`.
        """
        self._refuse_after_end()
        with self.failures_stop("reading the role of a call"):
            role, kept = self._classify(headers, request.conversation)
        key = (protocol, request.fingerprint, *sorted(kept.items()))
        call = self._undelivered.get(key)
        if call is None:
            self._refuse_beyond_limits()
            call = self._new_call(key, protocol, request, role, kept)
            self._tasks.start_soon(self._carry_out, call, num_bytes)
        await call.prepared.wait()
        if call.prompt is None:
            assert call.error is not None, "a call without a prompt has failed"
            raise call.error
        return call

    async def count_tokens(self, conversation: Conversation, num_bytes: int) -> int:
        """How many tokens the engine would receive. Nothing is recorded. Raises `WireError`."""
        self._refuse_after_end()
        try:
            with self.failures_stop("counting tokens"):
                heard = self._memory.match(conversation)
                return (await self._prepare(conversation, heard.matched, num_bytes)).num_tokens
        except ContextOverflow as overflow:
            return overflow.num_tokens

    def mark_delivered(self, call: OpenCall) -> None:
        """The harness has the whole answer: the same request will be a new call from now on."""
        if self._undelivered.get(call.key) is call:
            del self._undelivered[call.key]
            self._memory.mark_delivered(call.call_id)

    async def settle(self, timeout_s: float) -> None:
        """Open no more calls; wait for the open ones; those open after `timeout_s` are cancelled and recorded so."""
        self.has_ended = True
        with anyio.move_on_after(timeout_s):
            await self._all_done()
        for call in self._in_flight.values():
            call.scope.cancel()
        with anyio.move_on_after(CANCEL_S, shield=True):
            await self._all_done()

    async def _all_done(self) -> None:
        for call in tuple(self._in_flight.values()):
            await call.done.wait()

    # -----------------------------------------------------------------------------------------------------------------
    # From a request to a prompt
    # -----------------------------------------------------------------------------------------------------------------

    def _refuse_after_end(self) -> None:
        if self.has_ended:
            raise WireError(ErrorKind.NOT_FOUND, "this session has ended")

    def _refuse_beyond_limits(self) -> None:
        if self.failure is not None or len(self._in_flight) >= MAX_IN_FLIGHT:
            raise _overloaded()
        if self._num_calls >= self._limits.max_calls:
            self._reach("calls", f"all {self._num_calls} were made")
        elif self._num_sampled >= self._limits.max_sampled_tokens:
            self._reach("sampled_tokens", f"{self._num_sampled} were drawn in {self._num_calls} calls")
        if self.limit is not None:
            raise self._limit_error()

    def _limit_error(self) -> WireError:
        return WireError(ErrorKind.LIMIT, f"this session has reached its limit: {self.limit}")

    def _new_call(
        self,
        key: tuple[object, ...],
        protocol: str,
        request: WireRequest,
        role: CallRole,
        headers: dict[str, str],
    ) -> OpenCall:
        heard = self._memory.match(request.conversation)
        call = OpenCall(
            call_id=self._num_calls,
            key=key,
            protocol=protocol,
            request=request,
            role=role,
            headers=headers,
            heard=heard,
            received_at=self.now(),
            started=anyio.current_time(),
        )
        self._num_calls += 1
        self._undelivered[key] = self._in_flight[call.call_id] = call
        return call

    async def _prepare(self, conversation: Conversation, matched: Mapping[int, int], num_bytes: int) -> Prompt:
        """The prompt. Cancelled, it leaves its thread to end by itself."""
        recorded = self._memory.recorded_replies(matched)
        num_new = min(num_bytes, self._responder.num_new_chars(conversation, recorded))
        if num_new <= RENDERED_HERE_BYTES:
            return self._responder.prepare(conversation, recorded)
        return await to_thread.run_sync(
            self._responder.prepare, conversation, recorded, limiter=self._renderer, abandon_on_cancel=True
        )

    # -----------------------------------------------------------------------------------------------------------------
    # From a prompt to a record
    # -----------------------------------------------------------------------------------------------------------------

    async def _carry_out(self, call: OpenCall, num_bytes: int) -> None:
        try:
            with call.scope:
                with self.failures_stop(f"rendering call {call.call_id}"):
                    call.prompt = await self._prepare(call.request.conversation, call.heard.matched, num_bytes)
                call.prepared.set()
                with self.failures_stop(f"answering call {call.call_id}"):
                    await self._answer(call)
        except WireError as error:
            self._give_up(call, error)
        finally:
            if call.response is None and call.error is None:
                self._give_up(call, WireError(ErrorKind.OVERLOADED, CANCELLED))
            del self._in_flight[call.call_id]
            call.prepared.set()
            call.done.set()

    async def _answer(self, call: OpenCall) -> None:
        started = anyio.current_time()
        response = await self._draw(call)
        if call.incidents:
            response = replace(response, engine_s=anyio.current_time() - started)
        self._memory.keep(call, response, ended=anyio.current_time())
        self._num_sampled += response.usage.output_tokens
        if call.role is CallRole.MAIN:  # the answer to a compaction does not say yet that it has helped
            self._num_answers += 1
            if self._num_answers >= ANSWERS_THAT_HELP:
                self._num_overflows = 0
        call.response = response

    async def _draw(self, call: OpenCall) -> Response:
        """The answer of the engine; where that is lost, a whole one of the engine that comes back."""
        assert call.prompt is not None, "a call is drawn after it was prepared"
        num_draws = 1
        while True:
            draw = Draw(
                call_id=call.call_id,
                request_id=f"{self._request_prefix}-{call.call_id}-{num_draws}",
                seed=derive_seed(self._seed, call.call_id),
                max_tokens=self._limits.max_sampled_tokens - self._num_sampled,
                note=call.incidents.append,
            )
            try:
                return await self._responder.respond(call.prompt, draw)
            except EngineLost as lost:
                await self._wait_for_engine(call, num_draws, lost)
            num_draws += 1

    async def _wait_for_engine(self, call: OpenCall, num_draws: int, lost: EngineLost) -> None:
        """Return when the reply can be drawn again. Raises EngineError when it cannot, or was drawn often enough."""
        call.incidents.append(f"draw {num_draws} was lost: {lost}")
        if num_draws == MAX_DRAWS:
            raise EngineError(f"a reply was lost {num_draws} times, at last: {lost}") from lost
        limit_s, start = self._limits.engine_wait_s, anyio.current_time()
        try:
            with anyio.fail_after(limit_s):
                await self._responder.recover()
        except TimeoutError as error:
            raise EngineError(f"{lost}; it was not back within {limit_s:g} s") from error
        away_s = anyio.current_time() - start
        call.incidents.append(f"the engine was back after {away_s:.1f} s, and the whole reply was drawn again")

    def _give_up(self, call: OpenCall, error: WireError) -> None:
        call.error = error
        self._undelivered.pop(call.key, None)
        self._memory.give_up(call, failure=str(error.__cause__ or error), ended=anyio.current_time())
        if isinstance(error, ContextOverflow):
            self._note_overflow(error)

    def _note_overflow(self, overflow: ContextOverflow) -> None:
        self.overflow = overflow
        self._num_overflows += 1
        self._num_answers = 0
        if self._num_overflows >= MAX_OVERFLOWS:
            self._reach("context", f"{self._num_overflows} times what was sent did not fit, at last a {overflow}")

    @contextmanager
    def failures_stop(self, what: str) -> Iterator[None]:
        """A part that fails in here stops the rollout; the harness hears that its provider is overloaded."""
        try:
            with boundary(ProxyError, what):
                yield
        except BoundaryError as error:
            self._fail(error)
            raise _overloaded() from error

    def _fail(self, error: BoundaryError) -> None:
        """A part has failed: the first failure counts."""
        self.failure = self.failure or error
        self._stopped.set()

    def _reach(self, limit: str, detail: str) -> None:
        """The rollout has used up what it may: the first limit counts."""
        if self.limit is None:
            self.limit, self.limit_detail = limit, f"{limit}: {detail}"
        self._stopped.set()


def derive_seed(seed: int, call_id: int) -> int:
    """The sampling seed of one call: reproducible, and different for each call of a rollout."""
    return int.from_bytes(blake2b(f"{seed}/{call_id}".encode(), digest_size=4).digest())


def _overloaded() -> WireError:
    return WireError(ErrorKind.OVERLOADED, "the model is overloaded, try again later")
