"""Images for containers, built from a recipe once and then taken from the cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from clawhpc.errors import UserError
from clawhpc.ledger import Ledger, remove_tree
from clawhpc.lock import alone
from clawhpc.sandbox.staging import fingerprint

BUILD_S = 1800.0
"""For one build, downloads included."""
LOG_CHARS = 800
OWN_NAMESPACE = ("unshare", "--user", "--map-root-user")
"""A root without some capability (in a container, say) cannot build; inside a user namespace of its own it has all."""


def build_image(recipe: Path, *, apptainer: str, cache_dir: Path, ledger: Ledger, base: Path | None = None) -> Path:
    """The image of `recipe` as a folder, which both kinds of container start from, without FUSE and without waiting.

    Built at most once for each content, whoever asks at the same time, and never seen half-built; again where files are
    missing in it, as they are where a cluster removes what nobody has read for long. Of a build that is cut off the
    processes and temporary files belong to `ledger`, and what it has written of the image goes with the next build.
    `base`: a folder to build on in place of the recipe's own start, all of whose files root owns
    (containers/debian_base.sh makes one): for a machine that reaches Debian's packages but no image registry. Raises
    UserError with the end of the log.
    """
    image = cache_dir / "images" / f"{recipe.stem}-{_digest(recipe, base)}"
    image.parent.mkdir(parents=True, exist_ok=True)
    with alone(_beside(image, ".lock"), image, wait_s=BUILD_S):
        if not is_whole(image):
            _build(recipe, image, apptainer, ledger, base)
            _note_of(image).write_text(fingerprint(image))
    return image


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


def _build(recipe: Path, image: Path, apptainer: str, ledger: Ledger, base: Path | None) -> None:
    """Build beside `image` and rename. What builds that were killed have left of it goes first."""
    for left in image.parent.glob(f"{image.name}.*/"):
        remove_tree(left)
    folder = Path(tempfile.mkdtemp(prefix=f"{image.name}.", dir=image.parent))
    temporary = tempfile.mkdtemp(prefix="build-", dir=ledger.scratch)
    try:
        done = subprocess.run(
            _build_command(recipe, folder / "image", apptainer, base),
            env={**os.environ, **ledger.environment, "APPTAINER_TMPDIR": temporary},
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            raise UserError(f"{recipe}: cannot be built: {(done.stdout + done.stderr)[-LOG_CHARS:].strip()}")
        if image.exists():
            image.rename(folder / "broken")
        (folder / "image").rename(image)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{recipe}: has been building for {BUILD_S:.0f} s; build it by hand, and name the image"
        ) from None
    finally:
        remove_tree(folder)
        remove_tree(Path(temporary))


def _build_command(recipe: Path, target: Path, apptainer: str, base: Path | None) -> list[str]:
    on_base = [] if base is None else ["--build-arg", "BOOTSTRAP=localimage", "--build-arg", f"FROM={base}"]
    namespace = OWN_NAMESPACE if base is not None and os.getuid() == 0 else ()
    return [*namespace, apptainer, "build", "--sandbox", *on_base, str(target), str(recipe)]
