"""Settings that stand under names of the user's: the policies and sets of an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from clawhpc.campaign.settings import PolicyChoice
from clawhpc.config import CONF_DIR, RunConfig, register_defaults, typed
from clawhpc.errors import UserError
from clawhpc.proxy.settings import EndpointSettings


def config_of(*overrides: str) -> RunConfig:
    register_defaults()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return typed(compose("config", overrides=list(overrides)))


def test_policies_and_sets_are_named_on_the_command_line_and_their_paths_are_absolute() -> None:
    config = config_of(
        "evaluate.policies.start=p",
        "evaluate.policies.steps=runs/q/001/policies/step-*",
        "evaluate.policies.hub={folder: Qwen3-0.6B, renderer: qwen3}",
        "evaluate.policies.api={endpoint: {model: m, base_url: 'https://host/v1', output_price: 2}}",
        "evaluate.sets.mine=t",
        "evaluate.sets.folder='~/f'",
        "evaluate.sets.odd='~nobody-at-all/f'",
    )
    here = Path.cwd()
    assert config.evaluate.policies == {
        "start": str(here / "p"),
        "steps": str(here / "runs/q/001/policies/step-*"),
        "hub": PolicyChoice(folder=str(here / "Qwen3-0.6B"), renderer="qwen3"),
        "api": PolicyChoice(endpoint=EndpointSettings(model="m", base_url="https://host/v1", output_price=2.0)),
    }
    assert config.evaluate.sets == {
        "mine": str(here / "t"),
        "folder": str(Path.home() / "f"),
        "odd": str(here / "~nobody-at-all/f"),
    }


def test_a_setting_may_be_named_by_its_dotted_key() -> None:
    config = config_of("evaluate.policies.api.endpoint.model=m", "evaluate.policies.api.endpoint.base_url=http://h")
    assert config.evaluate.policies == {"api": PolicyChoice(endpoint=EndpointSettings(model="m", base_url="http://h"))}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluate.policies.x={foldr: p}", r"unknown key evaluate\.policies\.x\.foldr; allowed are endpoint, folder"),
        ("evaluate.policies.x={endpoint: {modl: m}}", r"unknown key evaluate\.policies\.x\.endpoint\.modl"),
        ("evaluate.policies.x={endpoint: {model: m}}", r"endpoint\.base_url is missing"),
        ("evaluate.policies.x={folder: ''}", r"evaluate\.policies\.x\.folder is empty"),
        ("evaluate.policies.x=''", r"evaluate\.policies\.x is empty"),
        ("evaluate.policies.x=[a]", r"`evaluate\.policies"),
        ("evaluate.sets.x={folder: t}", r"`evaluate\.sets"),
    ],
)
def test_what_is_wrong_below_a_name_is_said_with_its_key(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config_of(override)
