from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Tests marked `anyio` run on the loop that the worker runs on."""
    return "asyncio"
