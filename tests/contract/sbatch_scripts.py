"""What submitit hands to sbatch for each preset of conf/launch; `python -m tests.contract.sbatch_scripts` writes it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from clawhpc.config import CONF_DIR, RunConfig, register_defaults, typed
from clawhpc.launch.executor import campaign_executor, make_executor, submit
from clawhpc.launch.turn import script_end
from tests.fakes.sbatch import fake_sbatch, read_script

FOLDER = Path(__file__).parent / "sbatch"
PRESETS = sorted(path.stem for path in (CONF_DIR / "launch").glob("*.yaml") if path.stem != "local")


def config_of(preset: str) -> RunConfig:
    """The configuration with one preset, a learner on several nodes."""
    register_defaults()
    overrides = [f"launch={preset}", "launch.num_workers=3", "launch.slurm.account=mine", "learner.num_nodes=2"]
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return typed(compose("config", overrides=overrides))


def nothing() -> None:
    """A job."""


def render_scripts(preset: str) -> dict[str, str]:
    """The script of the campaign's job, and that of its workers."""
    config = config_of(preset)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as monkeypatch:
        folder = Path(name)
        taken = fake_sbatch(folder, monkeypatch)
        jobs, end, num_nodes = folder / "jobs", script_end(None), config.learner.num_nodes
        submit(campaign_executor(config.launch.campaign, num_nodes, jobs, end), [nothing])
        campaign = read_script(taken, jobs)
        submit(make_executor(config.launch, jobs, end), [nothing] * config.launch.num_workers)
        return {"campaign": campaign, "workers": read_script(taken, jobs)}


def golden_path(preset: str, kind: str) -> Path:
    """Where one script is kept."""
    return FOLDER / f"{preset}.{kind}.sh"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for one in PRESETS:
        for kind, script in render_scripts(one).items():
            golden_path(one, kind).write_text(script)
