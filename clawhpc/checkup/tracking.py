"""Whether Weights & Biases can be reached in the mode that is chosen. By default nothing is sent, and nothing asked."""

from __future__ import annotations

import socket
from collections.abc import Callable

from clawhpc.checkup.finding import Finding, State
from clawhpc.learner.settings import WandbMode

HOST = "api.wandb.ai"
REACH_S = 2.0
OFFLINE = "learner.wandb=offline, and `wandb sync` from a host with network"


def check_tracking(mode: WandbMode, *, has_key: bool, reach: Callable[[], str]) -> Finding:
    """`reach`: why its server cannot be reached, empty when it can; asked only where runs are to be sent to it."""
    what = "Weights & Biases"
    if mode == "disabled":
        return Finding(what=what, state=State.NOT_NEEDED, found="learner.wandb=disabled")
    if mode == "offline":
        return Finding(what=what, state=State.WORKS, found="offline: runs are written to disk, no network is used")
    if not has_key:
        remedy = f"wandb login; or {OFFLINE}"
        return Finding(what=what, state=State.MISSING, found="online, without a key", remedy=remedy)
    failure = reach()
    if failure:
        return Finding(what=what, state=State.MISSING, found=f"online; {failure}", remedy=OFFLINE)
    return Finding(what=what, state=State.WORKS, found=f"online; {HOST} can be reached")


def reach_server() -> str:
    """See `check_tracking`."""
    try:
        with socket.create_connection((HOST, 443), REACH_S):
            return ""
    except OSError as error:
        return f"{HOST} cannot be reached: {error.strerror or error}"
