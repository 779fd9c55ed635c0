"""The inverse of what the proxy stores."""

from __future__ import annotations

from collections.abc import Sequence

from clawhpc.records import CallRecord
from clawhpc.tree.build import whole_calls


def rebuild_prompt_ids(calls: Sequence[CallRecord], call_id: int) -> tuple[int, ...]:
    """The ids that the engine received for `call_id`, from the differences that the records hold."""
    return whole_calls(calls)[call_id].prompt_ids


def repeated_calls(calls: Sequence[CallRecord], call_id: int) -> list[int]:
    """The calls whose recorded replies stand in the prompt of `call_id`, in order."""
    return [graft.call_id for graft in whole_calls(calls)[call_id].repeats]
