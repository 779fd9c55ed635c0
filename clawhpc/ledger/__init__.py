"""What this process has started outside itself, and must not outlive it."""

from clawhpc.ledger.discard import discard
from clawhpc.ledger.janitor import Cleared, Remains, clear_remains, end_job, find_remains
from clawhpc.ledger.owner import Ledger, default_root
from clawhpc.ledger.reap import kill_marked, remove_tree

__all__ = [
    "Cleared",
    "Ledger",
    "Remains",
    "clear_remains",
    "default_root",
    "discard",
    "end_job",
    "find_remains",
    "kill_marked",
    "remove_tree",
]
