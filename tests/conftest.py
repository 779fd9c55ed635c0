from __future__ import annotations

import pytest

pytest_plugins = ["tests.engine_parts", "tests.sandbox_parts"]


@pytest.fixture
def anyio_backend() -> str:
    """Tests marked `anyio` run on the loop that the worker runs on."""
    return "asyncio"
