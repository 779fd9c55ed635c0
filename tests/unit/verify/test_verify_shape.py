"""Laws of the shaped reward, and what counts as a malformed call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.records import CallRecord, Reply, Tool, ToolCall, Verdict
from clawhpc.verify.settings import ShapingSettings
from clawhpc.verify.shape import malformed_share, shape, shaped_reward
from tests.fakes.records import make_call

UNIT = st.floats(0, 1)
SHAPING = st.builds(ShapingSettings, threshold=st.floats(0.01, 1), partial_credit=UNIT, format_penalty=UNIT)
BASH = Tool(name="Bash", description="", parameters={})
CALLED = ToolCall(id="1", name="Bash", arguments="{}")
"""Of a tool that is offered."""


def call(
    call_id: int, reply: Reply | None, *, tools: tuple[Tool, ...] = (BASH,), same_as: int | None = None
) -> CallRecord:
    tools = () if same_as is not None else tools
    return replace(make_call(call_id, reply), tools=tools, tools_same=same_as is not None, continues_id=same_as)


@given(UNIT, UNIT)
def test_without_settings_what_trains_is_the_raw_reward(raw: float, malformed: float) -> None:
    assert shaped_reward(raw, malformed, ShapingSettings()) == raw


@given(UNIT, UNIT, SHAPING)
def test_a_shaped_reward_is_from_0_to_1(raw: float, malformed: float, shaping: ShapingSettings) -> None:
    assert 0.0 <= shaped_reward(raw, malformed, shaping) <= 1.0


@given(UNIT, UNIT, UNIT, SHAPING)
def test_more_raw_reward_never_trains_less(
    one: float, other: float, malformed: float, shaping: ShapingSettings
) -> None:
    low, high = (shaped_reward(raw, malformed, shaping) for raw in sorted((one, other)))
    assert low <= high + 1e-12


@given(UNIT, UNIT, UNIT, SHAPING)
def test_each_malformed_call_costs_its_share_of_the_penalty(
    raw: float, one: float, other: float, shaping: ShapingSettings
) -> None:
    few, many = sorted((one, other))
    cost = shaped_reward(raw, few, shaping) - shaped_reward(raw, many, shaping)
    assert cost == pytest.approx(shaping.format_penalty * (many - few), abs=1e-9)


def test_a_threshold_without_partial_credit_is_all_or_nothing() -> None:
    shaping = ShapingSettings(threshold=0.8, partial_credit=0.0)
    assert [shaped_reward(raw, 0.0, shaping) for raw in (0.0, 0.79, 0.8, 1.0)] == [0.0, 0.0, 1.0, 1.0]


def test_partial_credit_counts_below_the_threshold_only() -> None:
    shaping = ShapingSettings(threshold=0.8, partial_credit=0.5)
    assert [shaped_reward(raw, 0.0, shaping) for raw in (0.4, 0.8)] == [0.2, 1.0]


def test_a_verdict_keeps_its_raw_reward_beside_what_trains() -> None:
    calls = [call(0, Reply(tool_calls=(CALLED,))), call(1, Reply(malformed_calls=1))]
    verdict = Verdict(reward=0.6, breakdown={"script": 0.6})
    shaped = shape(verdict, calls, ShapingSettings(threshold=0.5, format_penalty=0.2))
    assert shaped.raw_reward == 0.6
    assert shaped.reward == pytest.approx(0.8 + 0.2 * 0.5)
    assert shaped.breakdown == {"script": 0.6, "malformed_share": 0.5}


def test_a_verdict_that_nothing_shapes_is_left_as_it_is() -> None:
    verdict = Verdict(reward=0.6)
    assert shape(verdict, [call(0, Reply(malformed_calls=1))], ShapingSettings()) is verdict
    assert (verdict.raw_reward, verdict.unshaped) == (0.6, None)


def test_a_malformed_call_is_one_that_nobody_could_read_or_of_a_tool_that_nobody_offered() -> None:
    unknown = ToolCall(id="1", name="bash", arguments="{}")
    assert malformed_share([call(0, Reply(tool_calls=(CALLED,)))]) == 0.0
    assert malformed_share([call(0, Reply(tool_calls=(unknown,)))]) == 1.0
    assert malformed_share([call(0, Reply(tool_calls=(CALLED, unknown)))]) == 1.0
    assert malformed_share([call(0, Reply(text="<tool_call>{", malformed_calls=2))]) == 1.0
    assert malformed_share([call(0, Reply(tool_calls=(CALLED,)), tools=())]) == 1.0
    assert malformed_share([call(0, Reply(text="done"), tools=())]) == 0.0


def test_tools_that_stay_the_same_are_those_of_the_call_before() -> None:
    good = Reply(tool_calls=(CALLED,))
    assert malformed_share([call(0, good), call(1, good, same_as=0), call(2, good, same_as=1)]) == 0.0


def test_only_answered_calls_count() -> None:
    assert malformed_share([]) == 0.0
    assert malformed_share([call(0, None), call(1, Reply(malformed_calls=1)), call(2, Reply())]) == 0.5


@pytest.mark.parametrize("name", ["threshold", "partial_credit", "format_penalty"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_setting_outside_0_to_1_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(ShapingSettings(), **{name: value})


def test_a_threshold_that_everybody_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold=0\.0"):
        ShapingSettings(threshold=0.0)
