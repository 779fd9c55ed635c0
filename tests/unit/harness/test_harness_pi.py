from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawhpc.harness.base import COMMON_ENV
from clawhpc.harness.pi import Pi, PiSettings
from clawhpc.records import CallRole
from tests.fakes.launch import URL, asked, launch


def pi(**settings: bool) -> Pi:
    return Pi(PiSettings(**settings), Path("/cache/harness"))


def test_pi_finds_the_proxy_and_the_model_in_its_files() -> None:
    plan = launch(pi())
    provider = json.loads(plan.files[".pi/agent/models.json"])["providers"]["proxy"]
    assert provider["baseUrl"] == f"{URL}/v1"
    assert provider["api"] == "openai-completions"
    assert provider["models"] == [{"id": "policy", "contextWindow": 2048, "maxTokens": 256}]
    assert plan.argv[plan.argv.index("--provider") + 1] == "proxy"
    assert plan.argv[plan.argv.index("--model") + 1] == "policy"


def test_pi_contacts_nobody_else() -> None:
    assert launch(pi()).env == COMMON_ENV | {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}


@pytest.mark.parametrize("compact", [True, False])
def test_pi_compacts_only_where_it_may(compact: bool) -> None:
    settings = json.loads(launch(pi(compact=compact)).files[".pi/agent/settings.json"])
    assert settings == {"compaction": {"enabled": compact}}


@pytest.mark.parametrize("instruction", ["-v", "--version", "@notes.txt is long", "- one\n- two", "/new"])
def test_an_instruction_that_pi_would_take_for_an_option_or_a_file_is_none(instruction: str) -> None:
    assert launch(pi(), instruction).argv[-2:] == ("-p", f" {instruction}")


def test_the_call_without_tools_is_the_compaction_of_pi() -> None:
    assert pi().classify({}, asked("Sum it up.")) == (CallRole.COMPACTION, {})
