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
