"""A file of Weights & Biases that a kill has cut anywhere is cut back to its last whole record."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from clawhpc.learner.wandb_file import BLOCK_BYTES, drop_torn_end, end_of_whole_records

HEAD = b":W&B123"
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def write_records(sizes: list[int]) -> tuple[bytes, list[int]]:
    """A file with records of these sizes, as LevelDB writes its log, and where each of them ends."""
    data, ends = bytearray(HEAD), []
    for size in sizes:
        left, first = size, True
        while first or left:
            if (room := BLOCK_BYTES - len(data) % BLOCK_BYTES) < 7:
                data += bytes(room)
                room = BLOCK_BYTES
            piece = min(left, room - 7)
            last = piece == left
            kind = (WHOLE if last else FIRST) if first else (LAST if last else MIDDLE)
            data += bytes(4) + piece.to_bytes(2, "little") + bytes([kind]) + bytes([kind]) * piece
            left, first = left - piece, False
        ends.append(len(data))
    return bytes(data), ends


SIZES = st.lists(st.sampled_from([0, 1, 7, 300, BLOCK_BYTES - 21, BLOCK_BYTES - 14, BLOCK_BYTES, 3 * BLOCK_BYTES]))


@given(sizes=SIZES, share=st.floats(0, 1))
def test_what_is_cut_anywhere_ends_with_its_last_whole_record(sizes: list[int], share: float) -> None:
    data, ends = write_records(sizes)
    cut = round(share * len(data))
    assert end_of_whole_records(data[:cut]) == max([end for end in ends if end <= cut], default=min(cut, len(HEAD)))
    assert end_of_whole_records(data) == len(data)


def test_a_whole_file_stays_as_it_is(tmp_path: Path) -> None:
    file, (data, ends) = tmp_path / "run.wandb", write_records([300, 5000])
    for content, expected in ((data, data), (data[:-1], data[: ends[0]])):
        file.write_bytes(content)
        drop_torn_end(file)
        assert file.read_bytes() == expected
