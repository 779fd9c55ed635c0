from __future__ import annotations

import pytest

from tests.contract.sbatch_scripts import FOLDER, PRESETS, golden_path, render_scripts


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_asks_of_slurm_is_what_was_reviewed(preset: str) -> None:
    for kind, script in render_scripts(preset).items():
        assert script == golden_path(preset, kind).read_text(), f"{preset}, {kind}"


def test_every_golden_script_belongs_to_a_preset() -> None:
    assert set(FOLDER.glob("*.sh")) == {
        golden_path(preset, kind) for preset in PRESETS for kind in ("campaign", "workers")
    }
