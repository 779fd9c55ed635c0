"""Which container program counts, by how each has done."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawhpc.checkup.containers import Trial, check_image, judge_containers
from clawhpc.checkup.finding import State
from clawhpc.sandbox.settings import Kind

GOOD = Trial("1.4.5")
BAD = Trial("1.4.5", failure="did not start")
WORKS, MISSING, NOT_NEEDED = State.WORKS, State.MISSING, State.NOT_NEEDED


@pytest.mark.parametrize(
    ("kind", "apptainer", "bubblewrap", "states", "taken"),
    [
        ("auto", GOOD, GOOD, [WORKS, WORKS], "Apptainer"),
        ("auto", BAD, GOOD, [NOT_NEEDED, WORKS], "bubblewrap"),
        ("auto", GOOD, BAD, [WORKS, NOT_NEEDED], "Apptainer"),
        ("auto", BAD, BAD, [MISSING, MISSING], None),
        ("apptainer", BAD, GOOD, [MISSING, WORKS], None),
        ("bubblewrap", GOOD, BAD, [WORKS, MISSING], None),
        ("bubblewrap", BAD, GOOD, [NOT_NEEDED, WORKS], "bubblewrap"),
    ],
)
def test_one_that_works_is_enough_unless_another_is_chosen(
    kind: Kind, apptainer: Trial, bubblewrap: Trial, states: list[State], taken: str | None
) -> None:
    rows = judge_containers({"apptainer": apptainer, "bubblewrap": bubblewrap}, kind)
    assert [row.state for row in rows] == states
    assert [row.what for row in rows if "what workers take" in row.found] == ([taken] if taken else [])
    assert all(bool(row.remedy) == (row.state is MISSING) for row in rows)


@pytest.mark.parametrize(("version", "state"), [("1.1.9", State.LIMITED), ("1.2.0", WORKS), ("1.10.1-2", WORKS)])
def test_an_old_apptainer_works_with_a_limit(version: str, state: State) -> None:
    rows = judge_containers({"apptainer": Trial(version), "bubblewrap": GOOD}, "auto")
    assert rows[0].state is state


def test_an_image_must_be_there_or_be_built(tmp_path: Path) -> None:
    sif, recipe = tmp_path / "base.sif", tmp_path / "base.def"
    assert check_image(None, has_apptainer=False).state is NOT_NEEDED
    lacking = check_image(str(sif), has_apptainer=True)
    assert (lacking.state, lacking.remedy) == (MISSING, f"apptainer build {sif} containers/base.def")
    assert check_image(str(recipe), has_apptainer=True).remedy == "sandbox.image=containers/base.def"
    sif.touch()
    recipe.touch()
    assert check_image(str(sif), has_apptainer=False).state is WORKS
    assert check_image(str(recipe), has_apptainer=True).state is WORKS
    assert check_image(str(recipe), has_apptainer=False).state is MISSING
