"""The reward that a script gave: the last line that it printed, or the files that it wrote.

What runs in a verifier's sandbox may be the harness's own programs, and they may write where the script may. So a file
is taken only as what it is: a regular one, small, and not through a link.
"""

from __future__ import annotations

import math
import os
import re
import stat
from pathlib import Path

import msgspec

from clawhpc.errors import VerifierError
from clawhpc.records import ExecResult, Verdict

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
REWARD_JSON, REWARD_TEXT, REWARD_KEY = "reward.json", "reward.txt", "reward"
MAX_FILE_BYTES = 1 << 20
"""Of a reward file; they hold some numbers."""
TAIL_CHARS = 400
"""Of each output stream, what stands in an error: enough for a traceback's last lines."""


def read_reward(script: str, task_id: str, result: ExecResult) -> float:
    """The number in [0, 1] on the last line of what `script` printed. Raises `VerifierError` where there is none."""
    lines = result.stdout_tail.strip().splitlines()
    last = lines[-1].strip() if lines else ""
    fault = _cut_off(result)
    if not fault and result.exit_code:
        fault = f"ended with exit code {result.exit_code}"
    elif not fault and not lines:
        fault = "printed nothing"
    elif not fault and not _is_reward(last):
        fault = f"printed {last[:TAIL_CHARS]!r} on its last line, not a number in [0, 1]"
    if fault:
        raise _failure(script, task_id, result, fault)
    return float(last)


def read_reward_files(folder: Path, script: str, task_id: str, result: ExecResult) -> Verdict:
    """What `script` wrote to reward.json or reward.txt in `folder`, by the rule of Harbor, whatever its exit code.

    reward.json is an object; its numbers are the breakdown, and its `reward` the reward. Where it has none, the number
    in reward.txt is, else the only number that there is. Raises `VerifierError` where there is no number in [0, 1].
    """
    fault = _cut_off(result)
    try:
        if fault:
            raise ValueError(fault)
        numbers = _numbers(folder)
        reward = _the_reward(numbers)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise _failure(script, task_id, result, f"{error}, exit code {result.exit_code}") from error
    return Verdict(reward=reward, breakdown={name: value for name, value in numbers.items() if name != REWARD_KEY})


def _numbers(folder: Path) -> dict[str, float]:
    """By their names; the one in reward.txt is `reward`."""
    text, data = _read(folder / REWARD_TEXT), _read(folder / REWARD_JSON)
    if text is None and data is None:
        raise ValueError(f"wrote neither {REWARD_JSON} nor {REWARD_TEXT}")
    numbers: dict[str, float] = {}
    if data is not None:
        found = msgspec.json.decode(data)
        if not isinstance(found, dict):
            raise ValueError(f"{REWARD_JSON} is not an object")
        numbers = {name: float(value) for name, value in found.items() if type(value) in (int, float)}
    if REWARD_KEY not in numbers and text is not None:
        word = text.decode(errors="replace").strip()
        if not NUMBER.fullmatch(word):
            raise ValueError(f"{REWARD_TEXT} holds {word[:TAIL_CHARS]!r}, not a number")
        numbers[REWARD_KEY] = float(word)
    return numbers


def _the_reward(numbers: dict[str, float]) -> float:
    only = next(iter(numbers.values())) if len(numbers) == 1 else None
    reward = numbers.get(REWARD_KEY, only)
    if reward is None:
        named = f"names {len(numbers)} numbers and none of them {REWARD_KEY}" if numbers else "has no number"
        raise ValueError(f"{REWARD_JSON} {named}")
    if not 0.0 <= reward <= 1.0:
        raise ValueError(f"the reward {reward} is not in [0, 1]")
    if bad := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise ValueError(f"{bad[0]} is no finite number")
    return reward


def _read(path: Path) -> bytes | None:
    """The content of a small regular file; None where there is nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is no regular file")
        content = os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path.name} has more than {MAX_FILE_BYTES} bytes")
    return content


def _is_reward(text: str) -> bool:
    return bool(NUMBER.fullmatch(text)) and 0.0 <= float(text) <= 1.0


def _cut_off(result: ExecResult) -> str:
    """Why it did not run to its end; empty where it did."""
    if result.timed_out:
        return f"was stopped after {result.wall_s:.0f} s"
    if result.exceeded:
        return f"took more of the host than a sandbox may: {result.exceeded}"
    return ""


def _failure(script: str, task_id: str, result: ExecResult, fault: str) -> VerifierError:
    tails = (result.stdout_tail[-TAIL_CHARS:], result.stderr_tail[-TAIL_CHARS:])
    return VerifierError(f"{script} of {task_id} {fault}; stdout: {tails[0]!r}; stderr: {tails[1]!r}")
