from __future__ import annotations

import signal

import hypothesis
import pytest

# Of a test run in the background Ctrl-C is ignored, and by whatever it starts: the tests of Ctrl-C start commands.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine is no failure: the deadline of an example would make it one.
hypothesis.settings.register_profile("clawhpc", deadline=None)
hypothesis.settings.load_profile("clawhpc")

# Each may import those before it.
pytest_plugins = ["tests.sandbox_parts", "tests.engine_parts", "tests.campaign_parts", "tests.slurm_cluster"]


@pytest.fixture
def anyio_backend() -> str:
    """Tests marked `anyio` run on the loop that the worker runs on."""
    return "asyncio"


SHARED = ("slurm", "engine")
"""Markers of tests that share what takes long to start; a Slurm for those that have both."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several processes (`--dist loadgroup`) one runs all tests of a file, or all that share something; these first,
    for they take longest.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    items.sort(key=lambda item: group_of(item) not in SHARED)


def group_of(item: pytest.Item) -> str:
    """What the tests that one process runs have in common."""
    return next((name for name in SHARED if item.get_closest_marker(name)), item.path.name)
