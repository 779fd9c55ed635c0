"""Remove what a turn of a Slurm job has left on this host, at its end: -m clawhpc.ledger JOB.NODE.TURN [ROOT]."""

from __future__ import annotations

import sys
from pathlib import Path

from clawhpc.ledger.janitor import end_job
from clawhpc.ledger.owner import default_root


def main(job: str, root: str = "") -> None:
    """Say what cannot be removed; nothing where nothing was left."""
    cleared = end_job(Path(root) if root else default_root(), job)
    sys.stderr.writelines(f"{failure}\n" for failure in cleared.failures)


if __name__ == "__main__":
    main(*sys.argv[1:])
