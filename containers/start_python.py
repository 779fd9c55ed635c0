#!/usr/bin/python3 -IS
"""Run a harness from PyPI out of the folder that holds this file and its packages: start_python.py MODULE:FUNCTION ...

Python's own environment variables would do it too, but the programs that the harness runs would inherit them; and so it
sees no package but its own, whatever else this Python has installed.
"""

import gc
import sys
from importlib import import_module
from pathlib import Path

VERSION = (3, 11)
"""Compiled packages fit one minor version of Python: that of Debian 12, and of the image that base.def makes."""
MANY_OBJECTS = 100_000
"""Before Python looks for garbage: harnesses make a million objects as they start; the search is a tenth of that."""

if sys.version_info[:2] != VERSION:
    wanted, found = (".".join(map(str, version)) for version in (VERSION, sys.version_info[:2]))
    sys.exit(
        f"this harness is installed for Python {wanted}, but {sys.executable} of the sandbox is {found}: "
        "set sandbox.image to an image that has it, such as that of containers/base.def, or where it is a task's own "
        "image, take another harness"
    )
gc.set_threshold(MANY_OBJECTS)
sys.path.insert(0, str(Path(__file__).parent))
module, _, function = sys.argv.pop(1).partition(":")
sys.exit(getattr(import_module(module), function)())
