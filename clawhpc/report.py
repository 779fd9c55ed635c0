"""`python -m clawhpc.report RUN…`: compare runs on one self-contained page, and say where it is."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from clawhpc.errors import UserError
from clawhpc.paths import RunPaths, existing_run

PAGE = Path("report.html")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, and the page's path on standard output; else one line that says what is wrong.

    2 for what the user can mend, such as a folder that is no run; 1 for what the disk refuses.
    """
    arguments = parse_arguments(argv)
    try:
        if arguments.output.is_dir():
            raise UserError(f"{arguments.output}: is a folder; name a file")
        runs = name_runs(arguments.runs)
        write_report(runs, arguments.output)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"{error.filename or arguments.output}: {error.strerror}\n")
        return 1
    sys.stdout.write(f"{arguments.output}\n")
    return 0


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
    """Write the page, whole or not at all."""
    from clawhpc.store import write_atomic
    from clawhpc.view.compared import read_run
    from clawhpc.view.report_page import build_report

    write_atomic(output, build_report([read_run(name, paths) for name, paths in runs.items()]).encode())


if __name__ == "__main__":
    sys.exit(main())
