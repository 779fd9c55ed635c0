"""Campaigns in which something dies every few seconds, on one machine and on a real Slurm: is anything lost, or left?

    python -m benchmarks.chaos [--minutes 20] [--seed 0] [--write]

Each campaign has 48 groups of two rollouts: five steps of eight, and an evaluation before and after. The commands, the
workers, the proxy, Claude Code, the sandbox, the verifier and the learner are the real ones; a scripted engine stands in
vLLM's place (tests/fakes/scripted_vllm.py). Campaigns take turns between the machine and Slurm, each with another seed,
until the minutes are over; before the first of each kind one runs undisturbed. A campaign after which a rollout is
missing, doubled or untrue, or a process, mount, socket, file or job is left, ends the benchmark with an error.
--write puts the result into docs/results/chaos.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clawhpc.ledger import Ledger, remove_tree
from tests.chaos_parts import Account, chaos_in, write_policy
from tests.chaos_store import Tally, check_store
from tests.chaos_strikes import LOCAL, SLURM, in_turns
from tests.slurm_cluster import SlurmCluster

PAGE = Path(__file__).parents[1] / "docs/results/chaos.md"
NUM_STEPS = 5
NUM_HELDOUT = 4
BETWEEN_S = (2.0, 5.0)
LIMIT_S = 3600.0
"""For one campaign."""
MANY = 1000
"""Rounds of strikes: they end with the campaign."""
PLACES = {"local": "one machine", "slurm": "Slurm"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """One campaign."""

    place: str
    seed: int
    account: Account
    tally: Tally
    gone_s: float

    @property
    def num_strikes(self) -> int:
        """All that hit somebody."""
        return sum(self.account.strikes.values())


def main() -> None:
    """Run campaigns until the minutes are over; print, and perhaps write, the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    try:
        with Ledger.open(Path(f"/tmp/clawhpc-slurm-{os.getuid()}")) as ledger:
            cluster = SlurmCluster(ledger)
            try:
                cluster.start()
                results = list(run_all(root, cluster, minutes=options.minutes, seed=options.seed))
            finally:
                cluster.stop()
    finally:
        remove_tree(root)
    text = page(results)
    print(text)
    if options.write:
        PAGE.write_text(text)


def run_all(root: Path, cluster: SlurmCluster, *, minutes: float, seed: int) -> Iterable[Result]:
    """One undisturbed campaign in each place, then disturbed ones in turns; at least one in each."""
    policy = write_policy(root / "policy")
    for place in PLACES:
        yield run_one(root, policy, cluster, place, seed, disturbed=False)
    end, number = time.monotonic() + 60 * minutes, 0
    while number < len(PLACES) or time.monotonic() < end:
        number += 1
        yield run_one(root, policy, cluster, [*PLACES][number % len(PLACES)], seed + number, disturbed=True)


def run_one(root: Path, policy: Path, cluster: SlurmCluster, place: str, seed: int, *, disturbed: bool) -> Result:
    """One campaign, checked."""
    cache_dir = Path(os.environ.get("CLAWHPC_CACHE") or Path.home() / ".cache/clawhpc")
    with chaos_in(
        root,
        {},
        policy=policy,
        cache_dir=cache_dir,
        num_steps=NUM_STEPS,
        num_heldout=NUM_HELDOUT,
        seed=seed,
        cluster=cluster if place == "slurm" else None,
    ) as chaos:
        strikes = in_turns(SLURM if place == "slurm" else LOCAL, seed, MANY if disturbed else 0)
        account = chaos.run(strikes, between_s=BETWEEN_S, limit_s=LIMIT_S)
        gone_s = chaos.wait_until_nothing_is_left()
        result = Result(
            place=place, seed=seed, account=account, tally=check_store(chaos.paths, chaos.journal), gone_s=gone_s
        )
    print(result, flush=True)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------


def page(results: Sequence[Result]) -> str:
    """docs/results/chaos.md."""
    calm = {one.place: one for one in results if not one.num_strikes}
    struck = [one for one in results if one.num_strikes]
    total = sum((one.account.strikes for one in struck), Counter[str]())
    lines = [
        "# Campaigns in which something dies every few seconds",
        "",
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores. Made by `python -m benchmarks.chaos {' '.join(sys.argv[1:])}`, whose docstring says what is real in it. "
        f"Load of the machine at the end, other work included: {os.getloadavg()[1]:.0f}.",
        "",
        f"{len(struck)} campaigns, {sum(one.tally.groups for one in struck)} groups, "
        f"**{sum(one.tally.rollouts for one in struck)} planned rollouts: each has one record, and nothing was left** of {sum(total.values())} strikes: "
        "no process, mount, socket, temporary file or job.",
        "",
        "| place, seed | wall s (undisturbed) | strikes | commands | rollouts | drawn again: replies | tried again: rollouts | begun again: rollouts | outcomes | gone after s |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row(one, calm[one.place]) for one in struck),
        "",
        "*Drawn again*: the engine was lost in the middle of a reply. *Tried again*: an attempt failed for the machine's fault, and its worker made "
        "another. *Begun again*: a rollout that had drawn something was begun anew, mostly because its worker had died.",
        "",
        "| what was struck | " + " | ".join(PLACES.values()) + " |",
        "|---|" + "---|" * len(PLACES),
        *(f"| {name} | {' | '.join(str(count(struck, place, name)) for place in PLACES)} |" for name in sorted(total)),
        "",
        "Outcomes that are the machine's:",
        "",
        *([f"- {detail}" for one in struck for detail in one.tally.failed] or ["none"]),
        "",
    ]
    return "\n".join(lines)


def row(one: Result, calm: Result) -> str:
    """Of one campaign."""
    tally = one.tally
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(tally.outcomes.items()))
    cells = (
        f"{PLACES[one.place]}, {one.seed}",
        f"{one.account.wall_s:.0f} ({calm.account.wall_s:.0f})",
        one.num_strikes,
        1 + len(one.account.endings),
        tally.rollouts,
        tally.lost_draws,
        tally.tried_again,
        tally.begun_again,
        outcomes,
        f"{one.gone_s:.1f}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def count(results: Sequence[Result], place: str, name: str) -> int:
    """How often something was struck in one place."""
    return sum(one.account.strikes[name] for one in results if one.place == place)


if __name__ == "__main__":
    main()
