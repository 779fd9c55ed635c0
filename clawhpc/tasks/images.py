"""Images of tasks' own: where they lie, and what one that is built says of itself.

FOLDER/DIGEST/             the root file system of an image, from which both kinds of container start
FOLDER/DIGEST/.clawhpc/    written by its build (finish.sh): env, python, home
FOLDER/DIGEST.log          of its last build; beside it .lock and .whole, the builder's
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from clawhpc.records import TaskImage
from clawhpc.tasks.faults import SET_BY_US
from clawhpc.tasks.recipe import INSIDE, PASSED, Recipe

OF_THE_SHELL = frozenset({"_", "PWD", "OLDPWD", "SHLVL", *PASSED})
"""Variables of a build that are none of the image's."""
OF_DISTRIBUTIONS = frozenset({".bashrc", ".bash_logout", ".cshrc", ".profile", ".tcshrc", ".cache", ".wget-hsts"})
"""In /root: what nobody misses, unless finish.sh says `changed` of it."""


def is_noted(image: Path) -> bool:
    """Its build has come to its end: the note of it is the last thing that a build writes."""
    return image.with_name(f"{image.name}.whole").exists()


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image that is there."""

    image: TaskImage
    env: dict[str, str]
    """Of its base and of ENV, PATH included."""
    has_home: bool
    """There is something in its /root, which no sandbox shows."""


@dataclass(eq=False, kw_only=True)
class TaskImages:
    """The images of a run's tasks, all in one folder."""

    folder: Path
    bases: Mapping[str, str] = field(default_factory=dict)
    """See `TaskSettings`."""
    is_whole: Callable[[Path], bool] = is_noted
    """Whether an image is as it was built. Where time allows, `python -m clawhpc.check` asks for each of its files."""
    wanted: dict[str, list[Recipe]] = field(default_factory=dict)
    """Digest -> those that were looked for, built or not."""

    def place(self, recipe: Recipe) -> Path:
        """Where its image lies, built or not."""
        return self.folder / recipe.digest

    def find(self, recipe: Recipe) -> BuiltImage | None:
        """Its image; None where it is not built, or not whole."""
        self.wanted.setdefault(recipe.digest, []).append(recipe)
        place = self.place(recipe)
        if not self.is_whole(place):
            return None
        ours = place / INSIDE.removeprefix("/")
        try:
            env, python, home = ((ours / name).read_text(errors="replace") for name in ("env", "python", "home"))
        except OSError:
            return None
        return BuiltImage(
            image=TaskImage(folder=str(place), python=python.strip()),
            env=dict(filter(_is_kept, (line.split("=", 1) for line in env.split("\0") if "=" in line))),
            has_home=not OF_DISTRIBUTIONS.issuperset(home.splitlines()),
        )


def _is_kept(pair: list[str]) -> bool:
    name = pair[0]
    return name == "PATH" or not (name in OF_THE_SHELL or SET_BY_US.fullmatch(name))
