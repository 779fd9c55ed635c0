"""The recipes of conf/experiment: which there are, each as a configuration, and a table of what they take."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import product

import msgspec
from hydra import compose, initialize_config_dir

from clawhpc.config import CONF_DIR, RunConfig, register_defaults, typed
from clawhpc.estimate.memory import GIB
from clawhpc.estimate.run import estimate_run
from clawhpc.plan import asked_of

ALGORITHMS = ("clawgym2", "clawgym2_ppo")
HARNESSES = ("claude_code_full", "openclaw_full", "mixed_full")
MODELS = ("qwen3_30b_a3b", "qwen3_4b", "qwen3_0_6b")


@dataclass(frozen=True)
class Recipe:
    """A run of the paper, or one like it of another size."""

    experiment: str
    harness: str
    model: str

    @property
    def overrides(self) -> tuple[str, ...]:
        """On the command line."""
        return f"experiment={self.experiment}", f"harness={self.harness}", f"model={self.model}"

    def __str__(self) -> str:
        return " ".join(self.overrides)


RECIPES = [Recipe(*words) for words in product(ALGORITHMS, HARNESSES, MODELS)]


def changed(config: RunConfig, override: str) -> RunConfig:
    """As Hydra would make it with `override`, which is of one value, in a hundredth of the time."""
    key, value = override.split("=")
    content = msgspec.to_builtins(config)
    *parents, name = key.split(".")
    inner = functools.reduce(lambda mapping, parent: mapping[parent], parents, content)
    assert name in inner, key
    inner[name] = msgspec.yaml.decode(value)
    return msgspec.convert(content, RunConfig)


@functools.cache
def compose_recipe(recipe: Recipe, *more: str) -> RunConfig:
    """With `more` overrides. Kept: a composition takes a quarter of a second, and each recipe has several tests."""
    register_defaults()
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return typed(compose("config", overrides=[*recipe.overrides, *more]))


PAGE = CONF_DIR.parent / "docs/recipes.md"
BEGIN, END = "<!-- plans: written by python -m tests.contract.recipes -->\n", "<!-- end of plans -->\n"
HEAD = (
    *("algorithm", "harness", "model", "learner: GPUs", "GiB of each", "workers", "GPUs of each", "windows in a cache"),
    *("collect s", "learn s", "publish and load s", "step s", "GPU hours of 400 steps", "storage TB"),
)


def row_of(recipe: Recipe) -> tuple[object, ...]:
    """What the plan of a recipe says."""
    asked = asked_of(compose_recipe(recipe))
    found = estimate_run(asked)
    seconds = found.seconds
    return (
        *("PPO" if asked.credit.needs_critic else "GRPO", recipe.harness, recipe.model, asked.num_ranks),
        *(f"{found.learner.peak / GIB:.0f}", asked.workers.num, asked.engine_gpus, f"{found.cache_rollouts:.1f}"),
        *(f"{seconds.collect:.0f}", f"{seconds.learn:.0f}", f"{seconds.publish + seconds.load:.0f}"),
        *(f"{found.step_s:.0f}", f"{found.gpu_hours:,.0f}", f"{found.storage.run / 1e12:.1f}"),
    )


def table_of_plans() -> str:
    """As the page has it."""
    rows = [HEAD, ["---"] * len(HEAD), *map(row_of, RECIPES)]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def with_plans(page: str) -> str:
    """The page with the table renewed."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table_of_plans() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(with_plans(PAGE.read_text()))
