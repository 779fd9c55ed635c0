"""`python -m clawhpc.view RUN_DIR`: write the page of a run, and say where it is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from clawhpc.command import one_line_errors
from clawhpc.paths import RunPaths, existing_run
from clawhpc.view.detail import Decode
from clawhpc.view.page import ViewSettings, write_page


@one_line_errors()
def main(argv: Sequence[str] | None = None) -> None:
    """Say on standard output where the page is."""
    arguments = parse_arguments(argv)
    paths = existing_run(arguments.run_dir)
    decode = load_decode(arguments.policy or latest_policy(paths))
    page = write_page(paths, decode, ViewSettings(num_trees=arguments.trees))
    sys.stdout.write(f"{page}\n")


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
    main()
