"""The engine with a policy in it.

    start: folder, socket checked ─▶ process ─▶ healthy ─▶ version ────────────────────────────▶ probe ─▶ calls
    load:  folder checked ─▶ pause ─▶ weights ─▶ version ─▶ prefix cache emptied ─▶ resume ─▶ probe ─▶ calls

After every change of weights the engine's log-probs for the policy's probe are compared with the learner's, those of
each copy of the policy that it has. What an engine draws that failed to load, or whose log-probs disagree, is refused.
"""

from __future__ import annotations

import shutil
import socket as sockets
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import msgspec
from anyio.abc import Process

from clawhpc.engine.client import VllmEngine
from clawhpc.engine.tokenizer import count_token_ids
from clawhpc.errors import EngineError, UserError
from clawhpc.records import PolicyVersion
from clawhpc.serve.checks import check_parallel, check_policy_folder, check_probe, check_vllm, check_window, read_shape
from clawhpc.serve.command import engine_arguments, engine_environment, engine_program
from clawhpc.serve.log import EngineLog
from clawhpc.serve.process import running, session_cpu_s
from clawhpc.serve.settings import EngineSettings

NO_POLICY = -1
"""In place of a policy step: the engine holds no weights that it may draw from."""
POLL_S = 0.2
"""Between two looks at a server that starts: nothing tells from outside when it listens."""
HEALTH_S = 5.0
RESUME_S = 1.0
MAX_SOCKET_PATH = 107
SOCKET_NAME_LENGTH = 37
"""Of the sockets between vLLM's own processes, in their folder: a slash and a UUID."""


class PolicyServer:
    """A running engine and the policy that it draws from."""

    def __init__(
        self, engines: Sequence[VllmEngine], process: Process, settings: EngineSettings, log: EngineLog, *, on_cpu: bool
    ) -> None:
        self.engines = engines
        """One for each copy of the policy. Their calls fail with EngineError as soon as the process is gone."""
        self.policy_step = NO_POLICY
        """Of the weights that draw now, checked."""
        self._process = process
        self._settings = settings
        self._on_cpu = on_cpu
        self._log = log

    @property
    def engine(self) -> VllmEngine:
        """The first of them; what concerns the whole server is posted by it."""
        return self.engines[0]

    @property
    def alive(self) -> bool:
        """The engine's process has not ended."""
        return self._process.returncode is None

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the engine so far; 0 when it has ended."""
        return session_cpu_s(self._process.pid)

    def last_error(self) -> str:
        """Why the engine is gone, as far as is known: its exit code, the last error in its log, and where that is."""
        return last_words(self._process, self._log)

    async def load(self, policy: PolicyVersion, *, in_flight: Literal["wait", "keep"] = "wait") -> None:
        """Draw from `policy` from now on; new calls wait until it is in place.

        `in_flight`: what becomes of completions that are being drawn. `wait` lets them finish with the old weights.
        `keep` has them go on with the new ones, over a prefix that is computed again, and their `weight_versions` say
        from where (law 9). EngineError when it fails: what is drawn then is refused until a later load succeeds.
        """
        check_policy_folder(policy)
        loaded = False
        try:
            with anyio.fail_after(self._settings.load_timeout_s):
                await self._change_weights(policy, in_flight)
                await self._adopt(policy)
            loaded = True
        except TimeoutError as error:
            limit = self._settings.load_timeout_s
            raise EngineError(f"policy step {policy.step} did not load within {limit:g} s") from error
        finally:
            if not loaded:
                await self._give_up(policy)

    async def _start(self, policy: PolicyVersion) -> None:
        try:
            with anyio.fail_after(self._settings.startup_timeout_s):
                await self._wait_until_healthy()
                await self._set_version(policy.step)
                await self._adopt(policy)
        except TimeoutError as error:
            limit = self._settings.startup_timeout_s
            raise EngineError(f"the engine did not start within {limit:g} s: {self.last_error()}") from error

    async def _wait_until_healthy(self) -> None:
        while self.alive:
            with suppress(EngineError):
                return await self.engine.check_health(timeout_s=HEALTH_S)
            await anyio.sleep(POLL_S)
        raise EngineError(f"the engine did not start: {self.last_error()}")

    async def _change_weights(self, policy: PolicyVersion, in_flight: Literal["wait", "keep"]) -> None:
        await self.engine.post("/pause", query={"mode": in_flight})
        load = {"method": "load_policy", "kwargs": {"folder": str(Path(policy.path).absolute())}}
        await self.engine.post("/collective_rpc", body=load)
        await self._set_version(policy.step)
        recompute = {"reset_running_requests": str(in_flight == "keep")}
        emptied = await self.engine.post("/reset_prefix_cache", query=recompute)
        if not msgspec.json.decode(emptied)["success"]:
            raise EngineError("the engine's prefix cache could not be emptied: what it holds is of the old weights")
        await self.engine.post("/resume")

    async def _set_version(self, step: int) -> None:
        await self.engine.post("/update_weight_version", body={"new_version": str(step)})

    async def _adopt(self, policy: PolicyVersion) -> None:
        """Trust the engine when it agrees with the learner about the policy's probe."""
        for engine in self.engines:
            engine_logprobs = await engine.score(policy.probe.token_ids)
            check_probe(policy.step, policy.probe, engine_logprobs, self._settings.dtype, on_cpu=self._on_cpu)
        self._distrust("")
        self.policy_step = policy.step

    async def _give_up(self, policy: PolicyVersion) -> None:
        """Refuse what is drawn, and let those who wait for it learn so."""
        self.policy_step = NO_POLICY
        self._distrust(f"policy step {policy.step} did not load into the engine")
        with anyio.CancelScope(shield=True), suppress(EngineError):
            await self.engine.post("/resume", timeout_s=RESUME_S)

    def _distrust(self, reason: str) -> None:
        for engine in self.engines:
            engine.distrust(reason)


def last_words(process: Process, log: EngineLog) -> str:
    """See `PolicyServer.last_error`."""
    ended = "" if process.returncode is None else f"it ended with exit code {process.returncode}: "
    return ended + log.last_error()


@asynccontextmanager
async def serve_policy(
    settings: EngineSettings,
    policy: PolicyVersion,
    *,
    socket: Path,
    log: Path,
    environment: dict[str, str],
    cache_dir: Path,
) -> AsyncIterator[PolicyServer]:
    """An engine that draws from `policy`, checked, for as long as the block lasts; nothing of it is left afterwards.

    `socket`: its path, short, on a local file system; a folder beside it holds temporary files. `log`: added to.
    `environment`: the ledger's marks. `cache_dir`: where compiled code is kept for the next start. UserError for a
    folder without weights, a window that is longer than the policy's, a missing vLLM, a socket that cannot be;
    EngineError, with the log's last error, when the engine does not come up.
    """
    check_policy_folder(policy)
    folder = Path(policy.path).absolute()
    num_token_ids, shape = count_token_ids(folder), read_shape(folder)
    check_window(folder, shape, settings.max_model_len)
    check_parallel(folder, shape, settings)
    cpu = check_vllm()
    arguments = engine_arguments(
        settings, folder, socket, num_token_ids=num_token_ids, num_rows=shape.num_rows, cpu=cpu
    )
    with engine_folder(socket) as scratch:
        engine_log = EngineLog(log)
        variables = engine_environment(settings, scratch=scratch, cache_dir=cache_dir, cpu=cpu) | environment
        async with (
            running(
                [sys.executable, "-c", engine_program(settings), *arguments],
                environment=variables,
                folder=scratch,
                log=log,
                stop_timeout_s=settings.stop_timeout_s,
            ) as process,
            clients(socket, settings, num_token_ids, partial(last_words, process, engine_log)) as engines,
        ):
            server = PolicyServer(engines, process, settings, engine_log, on_cpu=cpu)
            await server._start(policy)
            yield server


@asynccontextmanager
async def clients(
    socket: Path, settings: EngineSettings, num_token_ids: int, explain: Callable[[], str]
) -> AsyncIterator[tuple[VllmEngine, ...]]:
    """A client for each copy of the policy behind a server."""
    engines = tuple(
        VllmEngine(
            socket,
            max_model_len=settings.max_model_len,
            num_token_ids=num_token_ids,
            rank=rank,
            explain=explain,
        )
        for rank in range(settings.data_parallel_size)
    )
    async with AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        yield engines


@contextmanager
def engine_folder(socket: Path) -> Iterator[Path]:
    """The engine's folder for temporary files, beside its socket; both are gone afterwards.

    A socket that nobody listens on is taken away first; UserError for one that is in use, or whose path is too long.
    """
    scratch = socket.with_name(f"{socket.name}.d")
    longest = max(len(str(socket)), len(str(scratch)) + SOCKET_NAME_LENGTH)
    if longest > MAX_SOCKET_PATH:
        raise UserError(f"{socket}: too long for the engine's sockets by {longest - MAX_SOCKET_PATH} characters")
    if _is_listening(socket):
        raise UserError(f"{socket}: another server listens here; stop it, or choose another path")
    try:
        socket.unlink(missing_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        socket.unlink(missing_ok=True)


def _is_listening(socket: Path) -> bool:
    with sockets.socket(sockets.AF_UNIX) as client:
        return client.connect_ex(str(socket)) == 0
