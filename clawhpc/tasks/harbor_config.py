"""task.toml of Harbor's format: its keys, and those without which a task would not be itself."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from clawhpc.tasks.faults import MAX_NESTING, Fault, check_env, check_text, nesting, read_text

ROOT_USERS = (None, "root", "0", 0)
NO_NETWORK = "there is no network in a sandbox: environment.network_mode, allow_internet are not followed"


class Server(msgspec.Struct, forbid_unknown_fields=True):
    """One of environment.mcp_servers."""

    name: str
    transport: str = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []


class EnvironmentKeys(msgspec.Struct, forbid_unknown_fields=True):
    """[environment]."""

    build_timeout_sec: float | None = None
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: float | None = None
    storage_mb: float | None = None
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: Any = None
    allow_internet: bool | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None
    mcp_servers: list[Server] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Any = None
    workdir: str | None = None


class Phase(msgspec.Struct, forbid_unknown_fields=True):
    """What [agent] and [verifier] have in common."""

    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class VerifierPhase(Phase, forbid_unknown_fields=True):
    """[verifier]."""

    env: dict[str, str] = {}
    environment_mode: str | None = None
    environment: Any = None
    collect: list[Any] = []


class Package(msgspec.Struct):
    """[task]: what it is called, and more that is for people."""

    name: str | None = None


class HarborConfig(msgspec.Struct, forbid_unknown_fields=True):
    """task.toml. A key that is not listed is an error: it may change what the task is."""

    schema_version: str | None = None
    version: str | None = None
    task: Package = msgspec.field(default_factory=Package)
    metadata: dict[str, Any] = {}
    verifier: VerifierPhase = msgspec.field(default_factory=VerifierPhase)
    agent: Phase = msgspec.field(default_factory=Phase)
    environment: EnvironmentKeys = msgspec.field(default_factory=EnvironmentKeys)
    solution: Any = None
    source: str | None = None
    artifacts: list[Any] = []
    steps: list[Any] | None = None
    multi_step_reward_strategy: str | None = None


def read_config(path: Path) -> HarborConfig:
    """The task.toml at `path`. Fault with the key for what is not of the format, or cannot be had here."""
    try:
        values = tomllib.loads(read_text(path))
        if nesting(values) > MAX_NESTING:
            raise Fault(f"{path}: nested more than {MAX_NESTING} levels deep")
        config = msgspec.convert(msgspec.to_builtins(values), HarborConfig)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Fault(f"{path}: {str(error).replace('$.', '')}") from error
    except RecursionError as error:
        raise Fault(f"{path}: nested more than {MAX_NESTING} levels deep") from error
    if refused := next(_refusals(config), None):
        raise Fault(f"{path}: {refused}")
    check_text(f"{path}: task.name", config.task.name or "", required=config.task.name is not None)
    check_env(f"{path}: environment.env", config.environment.env)
    check_env(f"{path}: verifier.env", config.verifier.env)
    return config


def _refusals(config: HarborConfig) -> Iterator[str]:
    """The keys without which a task would not be itself, and why they cannot be had."""
    environment, agent, verifier = config.environment, config.agent, config.verifier
    version = config.schema_version or config.version or "1.0"
    checks = (
        (version.partition(".")[0] != "1", f"schema_version {version!r}: only 1.x is known"),
        (config.steps is not None, "steps: tasks of several steps are not supported"),
        (environment.os.lower() != "linux", f"environment.os {environment.os!r}: only linux"),
        (environment.gpus or environment.tpu, "environment.gpus, tpu: there are none in a sandbox"),
        (environment.healthcheck is not None, "environment.healthcheck: there are no services to wait for"),
        (environment.skills_dir is not None, "environment.skills_dir: skills are not handed to harnesses"),
        (_asks_for_hosts(environment, agent, verifier), f"allowed_hosts, network_mode 'allowlist': {NO_NETWORK}"),
        (agent.user not in ROOT_USERS, f"agent.user {agent.user!r}: there is one user in a sandbox"),
        (verifier.user not in ROOT_USERS, f"verifier.user {verifier.user!r}: there is one user in a sandbox"),
        (verifier.environment_mode not in (None, "shared"), "verifier.environment_mode: only 'shared'"),
        (verifier.environment is not None, "verifier.environment: the verifier has the image of the harness"),
        (verifier.collect, "verifier.collect: there are no services to collect from"),
    )
    yield from (why for refused, why in checks if refused)
    for key, env in (("environment", environment.env), ("verifier", verifier.env)):
        if any("${" in value for value in env.values()):
            yield f"{key}.env: ${{…}} would take a variable of the host into a sandbox"
    for key, phase in (("agent", agent), ("verifier", verifier)):
        if phase.timeout_sec is not None and not 0 < phase.timeout_sec < math.inf:
            yield f"{key}.timeout_sec {phase.timeout_sec}: must be more than 0"
    for index, server in enumerate(environment.mcp_servers):
        if server.transport != "stdio":
            yield (
                f"environment.mcp_servers[{index}].transport {server.transport!r}: only 'stdio', a program in the "
                "image; there is no network to a service"
            )


def _asks_for_hosts(*parts: EnvironmentKeys | Phase) -> bool:
    return any(part.allowed_hosts or part.network_mode == "allowlist" for part in parts)
