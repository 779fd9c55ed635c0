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
FAULTS = (OSError, ValueError, msgspec.DecodeError)
"""Of a reward file."""
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

    reward.json is an object; its numbers are the breakdown, and its `reward` is the reward. So is the number in
    reward.txt; where there is no such file, so is the only number of reward.json under whatever name. A script writes
    one of the files, and the other may be by a program of the workspace that it ran: where both have a reward, the
    smaller counts, and where one has none in [0, 1], it takes nothing from the other. Raises `VerifierError` where
    neither has one.
    """
    if cut_off := _cut_off(result):
        raise _failure(script, task_id, result, f"{cut_off}, exit code {result.exit_code}")
    json, text = folder / REWARD_JSON, folder / REWARD_TEXT
    numbers: dict[str, float] = {}
    rewards, faults = [], []
    try:
        if (content := _read(json)) is not None:
            numbers = _numbers(content)
            rewards.append(_the_reward(numbers, alone=not os.path.lexists(text)))
    except FAULTS as error:
        faults.append(str(error))
    try:
        if (content := _read(text)) is not None:
            rewards.append(_number(content))
    except FAULTS as error:
        faults.append(str(error))
    if not rewards:
        fault = "; ".join(faults) or f"wrote neither {REWARD_JSON} nor {REWARD_TEXT}"
        raise _failure(script, task_id, result, f"{fault}, exit code {result.exit_code}")
    parts = {name: value for name, value in numbers.items() if name != REWARD_KEY}
    return Verdict(reward=min(rewards), breakdown=parts)


def _numbers(content: bytes) -> dict[str, float]:
    """Those in reward.json, by their names."""
    found = msgspec.json.decode(content)
    if not isinstance(found, dict):
        raise ValueError(f"{REWARD_JSON} is not an object")
    numbers = {name: float(value) for name, value in found.items() if type(value) in (int, float)}
    if bad := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise ValueError(f"{bad[0]} is no finite number")
    return numbers


def _the_reward(numbers: dict[str, float], *, alone: bool) -> float:
    """The one among the `numbers`, whose file is or is not the only one."""
    if REWARD_KEY in numbers:
        return _in_range(numbers[REWARD_KEY])
    if len(numbers) == 1 and alone:
        return _in_range(next(iter(numbers.values())))
    named = f"names {len(numbers)} numbers and none of them {REWARD_KEY}" if numbers else "has no number"
    raise ValueError(f"{REWARD_JSON} {named}")


def _number(content: bytes) -> float:
    """The one in reward.txt."""
    word = content.decode(errors="replace").strip()
    if not NUMBER.fullmatch(word):
        raise ValueError(f"{REWARD_TEXT} holds {word[:TAIL_CHARS]!r}, not a number")
    return _in_range(float(word))


def _in_range(reward: float) -> float:
    if not 0.0 <= reward <= 1.0:
        raise ValueError(f"the reward {reward} is not in [0, 1]")
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
