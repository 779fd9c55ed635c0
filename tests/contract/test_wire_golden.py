from __future__ import annotations

import pytest

from clawhpc.wire.base import WireProtocol
from tests.contract.wire_streams import FOLDER, PROTOCOLS, golden_path, render_streams


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_streams_are_byte_for_byte_those_that_were_reviewed(protocol: WireProtocol) -> None:
    for name, stream in render_streams(protocol).items():
        assert stream == golden_path(protocol, name).read_bytes(), name


def test_every_golden_file_belongs_to_a_stream() -> None:
    expected = {golden_path(protocol, name) for protocol in PROTOCOLS for name in render_streams(protocol)}
    assert set(FOLDER.glob("*.sse")) == expected
