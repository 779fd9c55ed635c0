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
    """What `script` wrote to reward.json or reward.txt in `folder`, whatever its exit code.

    reward.json is an object; its numbers are the breakdown, and its `reward`, or else the only number that it has, is
    the reward. So is the number in reward.txt. Where both files have one, the smaller counts: a script writes one of
    them, and the other may be by a program of the workspace that it ran. Raises `VerifierError` where there is no
    number in [0, 1].
    """
    fault = _cut_off(result)
    try:
        if fault:
            raise ValueError(fault)
        numbers, text = _numbers(folder), _number(folder)
        reward = _the_reward(numbers, text)
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise _failure(script, task_id, result, f"{error}, exit code {result.exit_code}") from error
    parts = {name: value for name, value in (numbers or {}).items() if name != REWARD_KEY}
    return Verdict(reward=reward, breakdown=parts)


def _numbers(folder: Path) -> dict[str, float] | None:
    """Those in reward.json, by their names; None where there is no such file."""
    data = _read(folder / REWARD_JSON)
    if data is None:
        return None
    found = msgspec.json.decode(data)
    if not isinstance(found, dict):
        raise ValueError(f"{REWARD_JSON} is not an object")
    numbers = {name: float(value) for name, value in found.items() if type(value) in (int, float)}
    if bad := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise ValueError(f"{bad[0]} is no finite number")
    return numbers


def _number(folder: Path) -> float | None:
    """The one in reward.txt; None where there is no such file."""
    text = _read(folder / REWARD_TEXT)
    if text is None:
        return None
    word = text.decode(errors="replace").strip()
    if not NUMBER.fullmatch(word):
        raise ValueError(f"{REWARD_TEXT} holds {word[:TAIL_CHARS]!r}, not a number")
    return float(word)


def _the_reward(numbers: dict[str, float] | None, text: float | None) -> float:
    if numbers is None and text is None:
        raise ValueError(f"wrote neither {REWARD_JSON} nor {REWARD_TEXT}")
    numbers = numbers or {}
    only = next(iter(numbers.values())) if len(numbers) == 1 else None
    rewards = [reward for reward in (numbers.get(REWARD_KEY, only), text) if reward is not None]
    if not rewards:
        named = f"names {len(numbers)} numbers and none of them {REWARD_KEY}" if numbers else "has no number"
        raise ValueError(f"{REWARD_JSON} {named}")
    if bad := [reward for reward in rewards if not 0.0 <= reward <= 1.0]:
        raise ValueError(f"the reward {bad[0]} is not in [0, 1]")
    return min(rewards)


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
