"""What this process has started outside itself, and must not outlive it."""

from clawhpc.ledger.discard import discard
from clawhpc.ledger.owner import Ledger, default_root
from clawhpc.ledger.reap import kill_marked, remove_tree

__all__ = ["Ledger", "default_root", "discard", "kill_marked", "remove_tree"]
