"""What the pages are made of: templates, one style, and scripts that their policy lets run by their hash."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

STYLE = "page.css"


def render(template: str, scripts: Sequence[str], **values: Any) -> str:
    """The page that `template` makes of `values`; its one script is `scripts`, joined in this order."""
    script = "\n".join(map(_asset, scripts))
    return (
        _environment()
        .get_template(template)
        .render(
            style=Markup(_asset(STYLE)),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            **values,
        )
    )


def to_json(value: Any) -> Markup:
    """JSON that may stand inside a `<script>` element whatever text it holds."""
    text = msgspec.json.encode(value).decode()
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("clawhpc.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _asset(name: str) -> str:
    return (files("clawhpc.view") / "templates" / name).read_text(encoding="utf-8")
