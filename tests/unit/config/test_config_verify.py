"""Who judges, by configuration: named keys where something is missing, and no key of an API in what is written."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hydra import compose, initialize_config_dir

from clawhpc.campaign.settings import EvaluateSettings
from clawhpc.config import CONF_DIR, RunConfig, open_campaign, register_defaults, typed
from clawhpc.errors import UserError
from clawhpc.evaluate import choose_sets
from clawhpc.records import Limits, TaskSpec, Verifier
from clawhpc.tasks.sets import TaskSets
from clawhpc.verify.settings import JudgeModel, JudgeSettings, VerifySettings, check_rubrics, judge_keys
from tests.fakes.judge_endpoint import RUBRIC
from tests.fakes.records import make_task
from tests.fakes.task_sets import lay_pinchbench

JUDGED = TaskSpec(task_id="essay", instruction="Write.", input_dir=None, verifier=Verifier(rubric=RUBRIC))
MODEL = JudgeModel(name="m", base_url="http://127.0.0.1:1/v1")
SETTINGS = JudgeSettings(models={"mine": MODEL}, request_s=30.0)
ROOMY = Limits(deadline_s=200.0, reserve_s=40.0, settle_s=2.0)


def composed(*overrides: str) -> RunConfig:
    register_defaults()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return typed(compose("config", overrides=list(overrides)))


def test_by_default_nobody_judges_and_nothing_is_shaped() -> None:
    assert composed().verify == VerifySettings()


@pytest.mark.parametrize(
    "tasks", [TaskSets(train=(make_task(), JUDGED), heldout=()), TaskSets(train=(), heldout=(JUDGED,))]
)
def test_a_task_with_a_rubric_and_no_judge_ends_the_campaign_before_there_is_a_run(
    tmp_path: Path, tasks: TaskSets
) -> None:
    config = RunConfig(cache_dir=str(tmp_path))
    refused = pytest.raises(UserError, match=r"task essay has a rubric, .* set verify\.judge\.models=\{mine: \{name")
    with refused, open_campaign(config, tasks, tmp_path / "runs"):
        pytest.fail("the campaign is open")
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_on_such_a_task_is_refused_too(tmp_path: Path) -> None:
    lay_pinchbench(tmp_path / "set")
    config = RunConfig(cache_dir=str(tmp_path), evaluate=EvaluateSettings(sets={"notes": str(tmp_path / "set")}))
    with pytest.raises(UserError, match=r"task task_note has a rubric, .* set verify\.judge\.models"):
        choose_sets(config)


def test_a_key_that_is_not_in_the_environment_ends_the_campaign_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    judge = replace(SETTINGS, models={"mine": replace(MODEL, api_key_env="JUDGE_KEY")})
    config = RunConfig(cache_dir=str(tmp_path), verify=VerifySettings(judge=judge), limits=ROOMY)
    tasks = TaskSets(train=(JUDGED,), heldout=())
    with (
        pytest.raises(UserError, match=r"verify\.judge\.models\.mine\.api_key_env=JUDGE_KEY: on .* holds no key"),
        open_campaign(config, tasks, tmp_path / "runs"),
    ):
        pytest.fail("the campaign is open")


def test_the_example_of_the_refusal_can_be_given_on_the_command_line() -> None:
    with pytest.raises(UserError) as caught:
        check_rubrics([JUDGED], JudgeSettings(), ROOMY)
    example = str(caught.value).partition("set ")[2]
    (model,) = composed(example).verify.judge.models.values()
    assert (model.name, model.base_url) == ("NAME", "https://HOST/v1")


def test_one_value_of_a_judge_that_a_file_names_can_be_changed() -> None:
    given = (
        "verify.judge.models={mine: {name: m, base_url: 'http://h/v1'}}",
        "+verify.judge.models.mine.temperature=null",
    )
    assert composed(*given).verify.judge.models["mine"].temperature is None


def test_what_the_page_on_verifiers_says_can_be_given(tmp_path: Path) -> None:
    page = (CONF_DIR.parent / "docs/verifiers.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    command = next(block for block in re.findall(r"```\n(.*?)```", page, re.DOTALL) if "clawhpc.evaluate" in block)
    words = [word for word in shlex.split(command) if "=" in word and not word.startswith("JUDGE_KEY")]
    assert list(composed(*words).verify.judge.models) == ["mine"]
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(example)
    judge = composed(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine").verify.judge
    assert [model.max_tokens for model in judge.models.values()] == [4096, 8192]


def test_a_judge_needs_its_part_of_the_deadline() -> None:
    check_rubrics([make_task(), JUDGED], SETTINGS, ROOMY)
    with pytest.raises(UserError, match=r"limits\.reserve_s=36: must be at least 37 for the judge of task essay"):
        check_rubrics([JUDGED], SETTINGS, replace(ROOMY, reserve_s=36.0))


def test_tasks_without_rubric_need_neither_judge_nor_time_for_one() -> None:
    check_rubrics([make_task()], JudgeSettings(), Limits(reserve_s=15.0))


def test_keys_are_found_by_the_names_in_the_settings_and_stand_in_none_of_them() -> None:
    judge = replace(SETTINGS, models={"a": replace(MODEL, api_key_env="A_KEY"), "b": MODEL})
    assert judge_keys(judge, {"A_KEY": "sk-1", "OTHER": "x"}) == {"A_KEY": "sk-1"}
    assert b"sk-1" not in msgspec.yaml.encode(RunConfig(verify=VerifySettings(judge=judge)))
    with pytest.raises(UserError, match="A_KEY"):
        judge_keys(judge, {"A_KEY": ""})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("verify.judge.models={mine: {name: m, base_url: h/v1}}", ("base_url must be http://", "verify.judge.models")),
        (
            "verify.judge.models={mine: {name: m, base_url: 'http://h', proxy: 'socks5://h'}}",
            ("proxy must be http://", "verify.judge.models"),
        ),
        ("verify.judge.models={mine: {name: m}}", ("base_url", "verify.judge.models")),
        (
            "verify.judge.models={mine: {name: m, base_url: 'http://h', key: x}}",
            ("verify.judge.models.mine.key", "api_key_env"),
        ),
        ("verify.judge.repeats=0", ("repeats=0", "at least 1")),
        ("verify.judge.request_s=nan", ("request_s=nan",)),
        ("verify.shaping.threshold=0", ("threshold=0.0", "more than 0")),
        ("verify.shaping.format_penalty=2", ("format_penalty=2", "from 0 to 1")),
        ("verify.judges=1", ("verify.judges", "judge, shaping")),
    ],
)
def test_an_error_names_the_key_and_what_is_allowed(override: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        composed(f"+{override}" if "judges" in override else override)
    for word in words:
        assert word in str(caught.value)
