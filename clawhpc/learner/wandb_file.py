"""The file that Weights & Biases writes offline, after a kill.

It is written in blocks, so that a kill leaves whole records and the beginning of one more. `wandb sync` sends the whole
ones, but takes such a file for one that is still written: it never counts as sent, and files of the same run that were
begun later are not sent at all. Without that beginning it is sent like any other.

The format is that of LevelDB's log (leveldb/doc/log_format.md), after a head of seven bytes: blocks of 32 KiB, in them
pieces with a head of their own, and records of one piece or several.
"""

from __future__ import annotations

import os
from pathlib import Path

BLOCK_BYTES = 32 * 1024
FILE_HEAD_BYTES = 7
PIECE_HEAD_BYTES = 7
"""A checksum of four, the length of what follows of two, the kind of one. No piece begins where a block has no room."""
LAST_KINDS = (1, 4)
"""A record in one piece; the last piece of a record."""


def drop_torn_end(file: Path) -> None:
    """Cut `file` after its last whole record. It is nobody's any more."""
    end = end_of_whole_records(file.read_bytes())
    if end < file.stat().st_size:
        os.truncate(file, end)


def end_of_whole_records(data: bytes) -> int:
    """Where the last whole record in `data` ends."""
    position = end = min(FILE_HEAD_BYTES, len(data))
    while True:
        room = BLOCK_BYTES - position % BLOCK_BYTES
        if room < PIECE_HEAD_BYTES:
            position += room
        head = data[position : position + PIECE_HEAD_BYTES]
        if len(head) < PIECE_HEAD_BYTES:
            return end
        position += PIECE_HEAD_BYTES + int.from_bytes(head[4:6], "little")
        if position > len(data):
            return end
        if head[6] in LAST_KINDS:
            end = position
