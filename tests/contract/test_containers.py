"""One recipe per image, and each says what it is, what it needs, and how it is tried."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RECIPES = sorted((Path(__file__).parents[2] / "containers").glob("*.def"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_has_a_test_labels_and_help_and_stands_in_the_readme(recipe: Path) -> None:
    sections = re.split(r"^%(\w+)", recipe.read_text(), flags=re.MULTILINE)[1:]
    filled = {name for name, text in zip(sections[::2], sections[1::2], strict=True) if text.strip()}
    assert filled >= {"test", "labels", "help"}
    assert f"`{recipe.name}`" in recipe.with_name("README.md").read_text()
