"""Each pinned harness, real and unmodified in a real sandbox, behind the real proxy, in every scenario.

docs/harnesses.md holds what each does. A harness that does something else than there has changed, or the proxy has:
`python -m tests.conformance --write` renews the page, for a person to look at.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clawhpc.errors import UserError
from clawhpc.harness.registry import ADAPTERS
from clawhpc.ledger import Ledger
from clawhpc.proxy.app import KEEP_ALIVE_S
from clawhpc.sandbox.settings import SandboxSettings
from tests.conformance.bench import Bench, Observed
from tests.conformance.laws import broken_laws
from tests.conformance.policy import Said
from tests.conformance.profiles import PROFILES, Profile
from tests.conformance.report import SAME, absent_row, every_run, read_page, row_of
from tests.conformance.scenarios import BY_NAME, Scenario, note
from tests.sandbox_parts import missing, working_sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.harness, pytest.mark.sandbox]


def runs() -> list[object]:
    """Every run that makes sense, the slow ones marked."""
    return [
        pytest.param(
            profile,
            scenario,
            id=f"{profile.label}-{scenario.name}",
            marks=() if scenario.name in profile.quick else pytest.mark.slow,
        )
        for profile, scenario in every_run()
        if scenario.name not in profile.cannot
    ]


@pytest.fixture
async def bench(ledger: Ledger, cache_dir: Path, tmp_path: Path) -> Bench:
    sandbox = await working_sandbox(SandboxSettings(kind="bubblewrap"), ledger, cache_dir)
    return Bench(sandbox, cache_dir, ledger.scratch, tmp_path)


@pytest.mark.parametrize(("profile", "scenario"), runs())
async def test_a_harness_keeps_the_laws_and_does_what_its_page_says(
    bench: Bench, profile: Profile, scenario: Scenario
) -> None:
    observed = await run(bench, profile, scenario)
    assert broken_laws(observed) == []
    found, written = row_of(observed), read_page()[profile.label, scenario.name]
    same = set(SAME) - ({"calls", "roles"} if scenario.name in profile.by_clock else set())
    assert {column: found[column] for column in same} == {column: written[column] for column in same}


@pytest.mark.slow
async def test_the_least_patient_harness_sits_through_a_long_silence(bench: Bench) -> None:
    """Of all harnesses nanobot gives a stream up first: after 90 s without an event of the protocol's own."""
    silence = replace(
        BY_NAME["silence"],
        says=lambda harness: (Said(text=harness.run(note("one")), silence_s=100.0),),
        keep_alive_s=KEEP_ALIVE_S,
    )
    observed = await run(bench, PROFILES["nanobot"], silence)
    assert broken_laws(observed) == []
    assert observed.ran == ("one",)
    assert observed.num_requests == len(observed.record.calls) == 2


async def run(bench: Bench, profile: Profile, scenario: Scenario) -> Observed:
    try:
        return await bench.run(profile, scenario)
    except UserError as error:
        missing(str(error))


def test_the_page_has_a_row_for_every_adapter_and_scenario() -> None:
    assert {profile.name for profile in PROFILES.values()} == ADAPTERS.keys()
    page = read_page()
    assert list(page) == [(profile.label, scenario.name) for profile, scenario in every_run()]
    for profile in PROFILES.values():
        for name in profile.cannot:
            absent = absent_row(profile, BY_NAME[name])
            assert page[profile.label, name] == {column: absent[column] for column in SAME}
