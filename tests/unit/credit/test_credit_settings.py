"""A wrong setting of credit is refused by its name, with what is allowed."""

from __future__ import annotations

import math

import pytest

from clawhpc.credit.settings import CreditSettings
from clawhpc.records import CallRole


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"estimator": "gae"}, "estimator='gae': allowed are group, path_gae, tree_gae"),
        ({"baseline": "mean"}, "baseline='mean': allowed are grpo, dr_grpo"),
        ({"gamma": 1.5}, "gamma=1.5: must be from 0 to 1"),
        ({"gamma": math.nan}, "gamma=nan: must be from 0 to 1"),
        ({"gae_lambda": -0.1}, "gae_lambda=-0.1: must be from 0 to 1"),
        ({"role_weights": {"main": 2.0}}, "role_weights.main=2.0: allowed are subagent, compaction, side"),
        ({"role_weights": {"side": 0.0}}, "role_weights.side=0.0: allowed are .* each a number over 0"),
        ({"role_weights": {"side": math.inf}}, "role_weights.side=inf: allowed are .* each a number over 0"),
        ({"role_weights": {"side": math.nan}}, "role_weights.side=nan: allowed are .* each a number over 0"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CreditSettings(**wrong)  # type: ignore[arg-type]


def test_main_alone_trains_until_other_roles_are_given_a_weight() -> None:
    assert CreditSettings().trained_roles == {CallRole.MAIN}
    both = CreditSettings(role_weights={"subagent": 0.5})
    assert both.trained_roles == {CallRole.MAIN, CallRole.SUBAGENT}
    assert both.role_weight(CallRole.MAIN) == 1.0
    assert both.role_weight(CallRole.SUBAGENT) == 0.5


@pytest.mark.parametrize(("estimator", "needs"), [("group", False), ("path_gae", True), ("tree_gae", True)])
def test_only_gae_needs_a_critic(estimator: str, needs: bool) -> None:
    assert CreditSettings(estimator=estimator).needs_critic is needs  # type: ignore[arg-type]
