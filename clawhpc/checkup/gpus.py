"""Whether the GPUs and their driver are what the installed engine and learner were built for. Imports none of them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawhpc.checkup.finding import Finding, State, lacking
from clawhpc.checkup.machine import Answer, Machine
from clawhpc.checkup.packages import GPU_BUILD

OLDEST_DRIVER: Mapping[int, tuple[int, int]] = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""For each major version of CUDA, whose minor versions are compatible: NVIDIA's CUDA compatibility guide, table 2."""
OLDEST_CAPABILITY = (7, 5)
"""Of vLLM: its installation guide."""
BFLOAT16_CAPABILITY = (8, 0)
BUILD_TOOLS = "apt-get install gcc python3-dev (as root), or module load gcc and a Python that has its headers"
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version,compute_cap", "--format=csv,noheader,nounits")


def check_gpus(machine: Machine, *, torch_cuda: str | None, dtype: str, needed: bool) -> list[Finding]:
    """What GPUs there are, and whether torch's CUDA can use them. `torch_cuda`: None for a build without."""
    if machine.find("nvidia-smi") is None:
        return [_no_gpu("no nvidia-smi", needed)]
    asked = machine.ask(*QUERY)
    rows = [[field.strip() for field in line.split(",")] for line in asked.output.splitlines() if line.count(",") == 3]
    if not asked.ok or not rows:
        return [_no_gpu(_reason(asked), needed)]
    names = [f"{name}, {_gib(mib)}, capability {capability}" for name, mib, _, capability in rows]
    found = "\n".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    capability = min(numbers(row[3]) for row in rows)
    return [_judge_gpus(found, capability, dtype, needed), _judge_driver(rows[0][2], torch_cuda, needed)]


def _gib(mib: str) -> str:
    """Some GPUs share the machine's memory, and name none of their own."""
    return f"{int(mib) / 1024:.0f} GiB" if mib.isdecimal() else f"memory {mib}"


def _reason(asked: Answer) -> str:
    return "nvidia-smi names none" if asked.ok else asked.reason


def _no_gpu(found: str, needed: bool) -> Finding:
    remedy = "run this where a GPU is: srun --gres=gpu:1 python -m clawhpc.doctor; or pip install -e '.[cpu]'"
    return Finding(what="GPUs", state=lacking(needed), found=found, remedy=remedy if needed else "")


def _judge_gpus(found: str, capability: tuple[int, ...], dtype: str, needed: bool) -> Finding:
    if capability < OLDEST_CAPABILITY:
        remedy = "choose newer ones: vLLM wants capability 7.5"
        return Finding(what="GPUs", state=lacking(needed), found=found, remedy=remedy)
    if dtype == "bfloat16" and capability < BFLOAT16_CAPABILITY:
        return Finding(what="GPUs", state=State.LIMITED, found=f"{found}; no bfloat16", remedy="engine.dtype=float32")
    if needed and dtype == "float32" and capability >= BFLOAT16_CAPABILITY:
        found = f"{found}; the engine would compute in float32, which is slower on them"
        return Finding(what="GPUs", state=State.LIMITED, found=found, remedy="engine=gpu")
    return Finding(what="GPUs", state=State.WORKS, found=found)


def _judge_driver(driver: str, torch_cuda: str | None, needed: bool) -> Finding:
    what = "GPU driver"
    if torch_cuda is None:
        found = f"{driver}; the installed torch is for CPUs"
        return Finding(what=what, state=lacking(needed), found=found, remedy=GPU_BUILD)
    least = OLDEST_DRIVER.get(numbers(torch_cuda)[0])
    found = f"{driver}; torch has CUDA {torch_cuda}"
    if least is None:
        return Finding(what=what, state=State.LIMITED, found=f"{found}, of which we know no least driver")
    wants = ".".join(map(str, least))
    if numbers(driver)[:2] < least:
        remedy = f"ask for driver {wants} or newer, or install torch for an older CUDA"
        return Finding(what=what, state=lacking(needed), found=f"{found}, which wants {wants}", remedy=remedy)
    return Finding(what=what, state=State.WORKS, found=found)


def check_compiler(machine: Machine, compilers: Sequence[str], headers: Path, *, needed: bool) -> Finding:
    """Whether there is what Triton builds with at its first kernel: one of `compilers`, and Python.h in `headers`."""
    header = headers / "Python.h"
    compiler, has_header = next(filter(None, map(machine.find, compilers)), None), bool(machine.read(str(header)))
    found = f"{compiler or 'no ' + ' or '.join(compilers)}; {header if has_header else f'no {header}'}"
    if compiler and has_header:
        return Finding(what="C compiler", state=State.WORKS, found=found)
    return Finding(what="C compiler", state=lacking(needed), found=found, remedy=BUILD_TOOLS if needed else "")


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version, to be compared."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def torch_cuda() -> str | None:
    """The CUDA that the installed torch was built for, read from a file of its: the import would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return read_cuda(Path(spec.origin).with_name("version.py").read_text())


def read_cuda(text: str) -> str | None:
    """Of torch/version.py."""
    found = re.search(r"^cuda\b[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None
