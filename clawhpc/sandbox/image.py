"""Images for containers, built from a recipe once and then taken from the cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from clawhpc.errors import UserError
from clawhpc.ledger import remove_tree
from clawhpc.lock import alone

BUILD_S = 1800.0
"""For one build, downloads included."""
LOG_CHARS = 800
OWN_NAMESPACE = ("unshare", "--user", "--map-root-user")
"""A root without some capability (in a container, say) cannot build; inside a user namespace of its own it has all."""


def build_image(recipe: Path, *, apptainer: str, cache_dir: Path, base: Path | None = None) -> Path:
    """The image of `recipe` as a folder, which both kinds of container start from, without FUSE and without waiting.

    Built at most once for each content, whoever asks at the same time, and never seen half-built. `base`: a folder to
    build on in place of the recipe's own start, all of whose files root owns (containers/debian_base.sh makes one): for
    a machine that reaches Debian's packages but no image registry. Raises UserError with the end of the log.
    """
    image = cache_dir / "images" / f"{recipe.stem}-{_digest(recipe, base)}"
    image.parent.mkdir(parents=True, exist_ok=True)
    with alone(image.with_suffix(".lock"), image, wait_s=BUILD_S):
        if not image.exists():
            _build(recipe, image, apptainer, base)
    return image


def _digest(recipe: Path, base: Path | None) -> str:
    return hashlib.sha256(recipe.read_bytes() + str(base).encode()).hexdigest()[:12]


def _build(recipe: Path, image: Path, apptainer: str, base: Path | None) -> None:
    """Build beside `image` and rename. What builds that were killed have left of it goes first."""
    for left in image.parent.glob(f"{image.name}.*/"):
        remove_tree(left)
    folder = Path(tempfile.mkdtemp(prefix=f"{image.name}.", dir=image.parent))
    on_base = [] if base is None else ["--build-arg", "BOOTSTRAP=localimage", "--build-arg", f"FROM={base}"]
    namespace = OWN_NAMESPACE if base is not None and os.getuid() == 0 else ()
    command = [*namespace, apptainer, "build", "--sandbox", *on_base, str(folder / "image"), str(recipe)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise UserError(f"{recipe}: cannot be built: {(done.stdout + done.stderr)[-LOG_CHARS:].strip()}")
        (folder / "image").rename(image)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{recipe}: has been building for {BUILD_S:.0f} s; build it by hand, and name the image"
        ) from None
    finally:
        remove_tree(folder)
