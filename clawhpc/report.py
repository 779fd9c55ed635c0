"""`python -m clawhpc.report RUN…`: compare runs on one self-contained page, and say where it is."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from clawhpc.command import one_line_errors
from clawhpc.errors import UserError
from clawhpc.paths import RunPaths, existing_run

PAGE = Path("report.html")


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Say on standard output where the page is."""
    arguments = parse_arguments(argv)
    write_report(name_runs(arguments.runs), arguments.output)
    sys.stdout.write(f"{arguments.output}\n")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m clawhpc.report",
        description="Write one HTML page that compares runs: evaluations with intervals and paired differences, "
        "curves, outcomes, cost, and the keys in which their configurations differ.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="the folder of a run, finished or not, as FOLDER or NAME=FOLDER"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=PAGE, metavar="FILE", help="where the page is written (%(default)s)"
    )
    return parser.parse_args(argv)


def name_runs(given: Sequence[str]) -> dict[str, RunPaths]:
    """Name -> run, in the given order. UserError where one is no run, or two have one name."""
    folders: dict[str, Path] = {}
    unnamed = [Path(text).resolve() for text in given if _is_folder(text)]
    short = Counter(_short(folder) for folder in unnamed)
    for text in given:
        if _is_folder(text):
            folder = Path(text).resolve()
            name = _short(folder) if short[_short(folder)] == 1 else str(folder)
        else:
            name, _, place = text.partition("=")
            folder = Path(place).resolve()
        if name in folders:
            raise UserError(f"{text}: there are two runs of this name; as NAME=FOLDER each can have its own")
        folders[name] = folder
    return {name: existing_run(folder) for name, folder in folders.items()}


def _is_folder(text: str) -> bool:
    """And no name with a folder."""
    return Path(text).is_dir() or "=" not in text


def _short(folder: Path) -> str:
    return "/".join(folder.parts[-2:])


def write_report(runs: dict[str, RunPaths], output: Path) -> None:
    """Write the page, whole or not at all. UserError where `output` can be no page."""
    from clawhpc.store import write_atomic
    from clawhpc.view.compared import read_run
    from clawhpc.view.report_page import build_report

    if output.is_dir():
        raise UserError(f"{output}: is a folder; name a file")
    write_atomic(output, build_report([read_run(name, paths) for name, paths in runs.items()]).encode())


if __name__ == "__main__":
    main()
