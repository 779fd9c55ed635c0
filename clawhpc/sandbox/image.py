"""Images for containers, built from a recipe once and then kept: the run's in the cache folder, tasks' in theirs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from clawhpc.errors import UserError
from clawhpc.ledger import Ledger, remove_tree
from clawhpc.lock import alone
from clawhpc.sandbox.staging import fingerprint

BUILD_S = 3 * 3600.0
"""For one build, downloads included: tasks' own may compile for long."""
LOG_CHARS = 800
OWN_NAMESPACE = ("unshare", "--user", "--map-root-user")
"""A root without some capability (in a container, say) cannot build; inside a user namespace of its own it has all."""
TEMPORARY = {"/tmp": "tmp", "/var/tmp": "var-tmp"}
"""What builds would share with the host and with one another -> a folder in that of the build."""


class BuildError(UserError):
    """A build has begun and failed; what it printed by then is in its log."""

    def __init__(self, recipe: Path, why: str, printed: str = "") -> None:
        """`printed`: its end, where the log is not kept for whoever reads this."""
        super().__init__(": ".join(part for part in (str(recipe), why, printed) if part))
        self.why = why


@dataclass(frozen=True, kw_only=True)
class Build:
    """What makes one image."""

    recipe: Path
    """A .def."""
    image: Path
    """The folder that it becomes."""
    apptainer: str
    is_local: bool
    """It starts from an image on this machine, all of whose files root owns."""
    arguments: tuple[str, ...] = ()
    """More of `apptainer build`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More of what its commands have."""
    log: Path | None = None
    """Keeps all that the last build has printed."""


def build_image(recipe: Path, *, apptainer: str, cache_dir: Path, ledger: Ledger, base: Path | None = None) -> Path:
    """The image of `recipe` as a folder in the cache, built at most once for each content: see `build_once`.

    `base`: a folder to build on in place of the recipe's own start, all of whose files root owns
    (containers/debian_base.sh makes one): for a machine that reaches Debian's packages but no image registry.
    """
    image = cache_dir / "images" / f"{recipe.stem}-{_digest(recipe, base)}"
    on_base = () if base is None else ("--build-arg", "BOOTSTRAP=localimage", "--build-arg", f"FROM={base}")
    build = Build(recipe=recipe, image=image, apptainer=apptainer, is_local=base is not None, arguments=on_base)
    build_once(build, ledger)
    return image


def build_once(build: Build, ledger: Ledger) -> None:
    """See that the image is there as a folder, which both kinds of container start from, without FUSE.

    Built at most once, whoever asks at the same time, and never seen half-built; again where files are missing in it,
    as they are where a cluster removes what nobody has read for long. Of a build that is cut off the processes and
    temporary files belong to `ledger`, and what it has written of the image goes with the next build. Raises
    BuildError with the end of the log; UserError where another process builds it for too long.
    """
    image = build.image
    image.parent.mkdir(parents=True, exist_ok=True)
    with alone(_beside(image, ".lock"), image, wait_s=BUILD_S):
        if not is_whole(image):
            _build(build, ledger)
            _note_of(image).write_text(fingerprint(image))


def is_whole(image: Path) -> bool:
    """`image` is as it was when it was built."""
    with suppress(OSError):
        return fingerprint(image) == _note_of(image).read_text()
    return False


def _note_of(image: Path) -> Path:
    """What `image` was when it was built."""
    return _beside(image, ".whole")


def _beside(image: Path, suffix: str) -> Path:
    """Of this image alone: in the name of its recipe there may be dots, after which others differ."""
    return image.with_name(image.name + suffix)


def _digest(recipe: Path, base: Path | None) -> str:
    return hashlib.sha256(recipe.read_bytes() + str(base).encode()).hexdigest()[:12]


def _build(build: Build, ledger: Ledger) -> None:
    """Build beside the image and rename. What builds that were killed have left of it goes first."""
    image = build.image
    for left in image.parent.glob(f"{image.name}.*/"):
        remove_tree(left)
    folder = Path(tempfile.mkdtemp(prefix=f"{image.name}.", dir=image.parent))
    temporary = Path(tempfile.mkdtemp(prefix="build-", dir=ledger.scratch))
    try:
        _run(build, folder / "image", temporary, ledger)
        if image.exists():
            image.rename(folder / "broken")
        (folder / "image").rename(image)
    finally:
        remove_tree(folder)
        remove_tree(temporary)


def _run(build: Build, target: Path, temporary: Path, ledger: Ledger) -> None:
    for name in TEMPORARY.values():
        (temporary / name).mkdir()
    inside = {f"APPTAINERENV_{name}": value for name, value in {**build.environment, **ledger.environment}.items()}
    printed = build.log or temporary / "log"
    try:
        with printed.open("w") as log:
            done = subprocess.run(
                _build_command(build, target, temporary),
                env={**os.environ, **ledger.environment, **inside, "APPTAINER_TMPDIR": str(temporary)},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=BUILD_S,
                stdin=subprocess.DEVNULL,
            )
    except subprocess.TimeoutExpired:
        why = f"has been building for {BUILD_S:.0f} s; build it by hand, and name the image"
        raise BuildError(build.recipe, why) from None
    if done.returncode != 0:
        end = printed.read_text(errors="replace")[-LOG_CHARS:].strip()
        raise BuildError(build.recipe, "cannot be built", end)


def _build_command(build: Build, target: Path, temporary: Path) -> list[str]:
    binds = [part for inside, name in TEMPORARY.items() for part in ("--bind", f"{temporary / name}:{inside}")]
    namespace = OWN_NAMESPACE if build.is_local and os.getuid() == 0 else ()
    return [*namespace, build.apptainer, "build", "--sandbox", *binds, *build.arguments, str(target), str(build.recipe)]
