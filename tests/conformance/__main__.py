"""Run harnesses through scenarios and print the table: python -m tests.conformance [--harness pi] [--scenario unicode].

`--write` puts the rows into docs/harnesses.md. What breaks a law is printed too, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import anyio

from clawhpc.ledger import Ledger
from clawhpc.sandbox.open import open_sandbox
from clawhpc.sandbox.settings import SandboxSettings
from tests.conformance.bench import Bench
from tests.conformance.laws import broken_laws
from tests.conformance.profiles import PROFILES, Profile
from tests.conformance.report import COLUMNS, Row, Rows, absent_row, every_run, row_of, table, table_line, write_page
from tests.conformance.scenarios import BY_NAME, Scenario


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--harness", action="append", choices=PROFILES, help="several may be named; default: all")
    parser.add_argument("--scenario", action="append", choices=BY_NAME, help="several may be named; default: all")
    parser.add_argument("--write", action="store_true", help="put the rows into docs/harnesses.md")
    chosen = parser.parse_args()
    print(table(COLUMNS, ()))
    rows, faults = anyio.run(run_all, chosen.harness or list(PROFILES), chosen.scenario or list(BY_NAME))
    if chosen.write:
        write_page(rows)
    return 1 if faults else 0


async def run_all(labels: list[str], names: list[str]) -> tuple[Rows, list[str]]:
    """The rows of the chosen runs that broke no law, and the laws that the others broke; one run after the other."""
    cache_dir = Path(os.environ.get("CLAWHPC_CACHE") or Path.home() / ".cache/clawhpc")
    rows: Rows = {}
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="claw-", dir="/tmp") as root, Ledger.open(Path(root)) as ledger:
        folder = Path(root, "parts")
        folder.mkdir()
        sandbox = await open_sandbox(SandboxSettings(kind="bubblewrap"), ledger=ledger, cache_dir=cache_dir)
        bench = Bench(sandbox, cache_dir, ledger.scratch, folder)
        for profile, scenario in every_run():
            if profile.label not in labels or scenario.name not in names:
                continue
            row, broken = await run_one(bench, profile, scenario)
            print(table_line(row), flush=True)
            for fault in broken:
                print(f"{profile.label} {scenario.name}: {fault}", file=sys.stderr, flush=True)
            faults += broken
            if not broken:
                rows[profile.label, scenario.name] = row
    return rows, faults


async def run_one(bench: Bench, profile: Profile, scenario: Scenario) -> tuple[Row, list[str]]:
    """Its row, and the laws that it broke."""
    if scenario.name in profile.cannot:
        return absent_row(profile, scenario), []
    observed = await bench.run(profile, scenario)
    return row_of(observed), broken_laws(observed)


sys.exit(main())
