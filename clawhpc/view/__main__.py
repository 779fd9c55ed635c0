"""`python -m clawhpc.view RUN_DIR`: write the page of a run, and say where it is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from clawhpc.errors import UserError
from clawhpc.paths import RunPaths, existing_run
from clawhpc.view.detail import Decode
from clawhpc.view.page import ViewSettings, write_page


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, and the page's path on standard output; else one line that says what is wrong.

    2 for what the user can mend, such as a folder that is no run; 1 for what the disk refuses.
    """
    arguments = parse_arguments(argv)
    try:
        paths = existing_run(arguments.run_dir)
        decode = load_decode(arguments.policy or latest_policy(paths))
        page = write_page(paths, decode, ViewSettings(num_trees=arguments.trees))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"{error.filename or RunPaths(arguments.run_dir).page}: {error.strerror}\n")
        return 1
    sys.stdout.write(f"{page}\n")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m clawhpc.view", description="Write one HTML page for a run.")
    parser.add_argument("run_dir", type=Path, help="the folder of a run, finished or not")
    parser.add_argument(
        "--trees",
        type=int,
        default=ViewSettings().num_trees,
        metavar="N",
        help="rollouts with tree and texts (%(default)s)",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FOLDER",
        help="a policy whose tokenizer.json decodes (default: the run's latest)",
    )
    return parser.parse_args(argv)


def latest_policy(paths: RunPaths) -> Path | None:
    """The newest policy of the run that has a tokenizer; None where there is none."""
    folders = sorted(file.parent for file in paths.policies.glob("step-*/tokenizer.json"))
    return folders[-1] if folders else None


def load_decode(policy: Path | None) -> Decode:
    """How to read token ids. Without a policy they stay numbers."""
    if policy is None:
        return spell_ids
    from clawhpc.engine.tokenizer import TextTokenizer

    return TextTokenizer(policy).decode


def spell_ids(token_ids: Sequence[int]) -> str:
    """The ids themselves, for a run without a tokenizer."""
    return "".join(f"⟨{token}⟩" for token in token_ids)


if __name__ == "__main__":
    sys.exit(main())
