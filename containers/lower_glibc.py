#!/usr/bin/env python3
"""Lets a program that was linked against glibc 2.38 run on glibc 2.36, or says why it cannot.

Since glibc 2.38 a C compiler turns `strtol` and its kin into `__isoc23_strtol@GLIBC_2.38`, which differs from the
old function only in that it also accepts binary literals (`0b101`). Where those names are all that a program wants of
the newer library, they are pointed back at the plain names in GLIBC_2.2.5. Anything else that is too new is refused.

Usage: lower_glibc.py FILE...   Little-endian ELF64 only; in place; a second run changes nothing.
"""

import re
import struct
import sys
from pathlib import Path

NEWEST = (2, 36)
"""glibc of Debian 12."""
BASE = "GLIBC_2.2.5"
"""The first version of glibc on x86-64: what the plain functions carry."""
RENAMED = re.compile(r"__isoc23_strto(l|ul|ll|ull)$")
PREFIX_LENGTH = len("__isoc23_")
SYMBOL_SIZE = 24


class Elf:
    """The dynamic symbols of one ELF file, and the library versions that they want."""

    def __init__(self, data: bytearray) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise SystemExit("not a little-endian ELF64 file")
        self.data = data
        sections = self._sections()
        self.strings = sections[".dynstr"][0]
        self.symbols, symbols_size = sections[".dynsym"]
        self.num_symbols = symbols_size // SYMBOL_SIZE
        self.symbol_versions = sections[".gnu.version"][0]
        self.needed = self._needed_versions(sections[".gnu.version_r"][0])

    def _sections(self) -> "dict[str, tuple[int, int]]":
        """Name -> (offset, size)."""
        (table,) = struct.unpack_from("<Q", self.data, 0x28)
        entry_size, count, names_index = struct.unpack_from("<HHH", self.data, 0x3A)
        headers = [struct.unpack_from("<IIQQQQIIQQ", self.data, table + i * entry_size) for i in range(count)]
        names = headers[names_index][4]
        return {self.text(names + header[0]): (header[4], header[5]) for header in headers}

    def _needed_versions(self, offset: int) -> "dict[int, tuple[str, int]]":
        """Index as used by the symbols -> (version, offset of its record)."""
        needed = {}
        while True:
            _, count, _, first, to_next = struct.unpack_from("<HHIII", self.data, offset)
            record = offset + first
            for _ in range(count):
                _, _, index, name, step = struct.unpack_from("<IHHII", self.data, record)
                needed[index] = (self.text(self.strings + name), record)
                record += step
            if not to_next:
                return needed
            offset += to_next

    def text(self, offset: int) -> str:
        """The string that begins at `offset`."""
        return self.data[offset : self.data.index(b"\0", offset)].decode()


def is_too_new(version: str) -> bool:
    """Whether `version`, as `GLIBC_2.38`, is of a library newer than NEWEST."""
    match = re.match(r"GLIBC_(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) > NEWEST


def lower(elf: Elf) -> "list[str]":
    """Point every symbol that is too new at its plain name, and rename its version; returns the symbols."""
    too_new = {index for index, (version, _) in elf.needed.items() if is_too_new(version)}
    if not too_new:
        return []
    base, base_record = next((index, at) for index, (version, at) in elf.needed.items() if version == BASE)
    lowered = []
    for number in range(elf.num_symbols):
        version_at = elf.symbol_versions + 2 * number
        (index,) = struct.unpack_from("<H", elf.data, version_at)
        if index in too_new:
            lowered.append(lower_symbol(elf, elf.symbols + SYMBOL_SIZE * number))
            struct.pack_into("<H", elf.data, version_at, base)
    for index in too_new:
        record = elf.needed[index][1]
        elf.data[record : record + 4] = elf.data[base_record : base_record + 4]  # hash of the version's name
        elf.data[record + 8 : record + 12] = elf.data[base_record + 8 : base_record + 12]  # the name itself
    return lowered


def lower_symbol(elf: Elf, symbol: int) -> str:
    """Cut the prefix off one symbol's name: the rest of the same string is the plain name."""
    (name_at,) = struct.unpack_from("<I", elf.data, symbol)
    name = elf.text(elf.strings + name_at)
    if not RENAMED.match(name):
        raise SystemExit(f"needs {name} of a glibc newer than {NEWEST[0]}.{NEWEST[1]}: take an older package")
    struct.pack_into("<I", elf.data, symbol, name_at + PREFIX_LENGTH)
    return name


def main() -> None:
    """Lower each file named on the command line."""
    for path in map(Path, sys.argv[1:]):
        elf = Elf(bytearray(path.read_bytes()))
        lowered = lower(elf)
        if lowered:
            path.write_bytes(elf.data)
        sys.stdout.write(f"{path}: {', '.join(lowered) or 'nothing to do'}\n")


if __name__ == "__main__":
    main()
