"""What --help costs: Hydra copies its sources for each group of options that it lists."""

from __future__ import annotations

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from clawhpc.config import CONF_DIR, register_defaults


def test_listing_the_groups_of_options_copies_no_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    register_defaults()
    Plugins.instance()
    loader = ConfigLoaderImpl(create_config_search_path(str(CONF_DIR)))
    copied: list[DictConfig] = []
    monkeypatch.setattr(DictConfig, "__deepcopy__", lambda self, memo: copied.append(self))
    assert "harness" in loader.list_groups("")
    assert copied == []


def test_what_is_composed_is_nobody_else_s() -> None:
    def composed() -> Any:
        with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
            return compose("config", overrides=[])

    register_defaults()
    changed = composed()
    changed.limits.max_calls += 1
    assert composed().limits.max_calls == changed.limits.max_calls - 1
