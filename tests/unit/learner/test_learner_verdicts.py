from dataclasses import replace

import pytest

from clawhpc.learner.verdicts import verdict_metrics
from clawhpc.records import RolloutRecord, Verdict
from tests.fakes.records import make_group, make_judgement, make_record


def with_verdict(verdict: Verdict | None) -> RolloutRecord:
    return replace(make_record(make_group()), verdict=verdict)


def test_rewards_of_scripts_alone_add_nothing_to_a_log() -> None:
    assert verdict_metrics([with_verdict(Verdict(reward=0.5)), with_verdict(None)]) == {}


def test_parts_raw_reward_agreement_and_cost_are_told() -> None:
    judgement = replace(make_judgement(), cost_usd=0.25)
    parts = {"script": 0.5, "rubric": 0.75, "rubric/right": 0.75, "malformed_share": 0.0}
    verdict = Verdict(reward=1.0, unshaped=0.6, breakdown=parts, judgement=judgement)
    other = replace(verdict, unshaped=0.8, judgement=replace(judgement, agreement=1.0))
    assert verdict_metrics([with_verdict(verdict), with_verdict(other), with_verdict(None)]) == pytest.approx(
        {
            **{"verify/raw_reward": 0.7, "verify/script": 0.5, "verify/rubric": 0.75, "verify/malformed_share": 0.0},
            **{"verify/agreement": 0.75, "verify/judge_usd": 0.5},
        }
    )


def test_a_cost_that_is_not_known_of_one_is_not_told_for_all() -> None:
    known = Verdict(reward=1.0, judgement=replace(make_judgement(), cost_usd=0.25))
    metrics = verdict_metrics([with_verdict(known), with_verdict(replace(known, judgement=make_judgement()))])
    assert metrics == {"verify/agreement": 0.5}
