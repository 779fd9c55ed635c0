"""The cold start: when a stage ends, what is practised, what is left after a kill, and that it teaches."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from clawhpc.engine.render import ChatRenderer
from clawhpc.errors import UserError
from clawhpc.learner.cold_start import (
    Lessons,
    Stage,
    book_of,
    checkpoint_interval,
    make_policy,
    plan_stages,
    sample_examples,
    write_tokenizer,
)
from clawhpc.learner.exam import Gate, Rates
from clawhpc.learner.settings import ColdStartSettings, LearnerSettings, PolicySettings
from clawhpc.learner.traces import Example, Skill, TraceBook, encode_example, read_book
from clawhpc.store import read_policy
from tests.fakes.learner_campaign import Killed
from tests.fakes.traces import SYSTEM, captured_tasks

SMALL = PolicySettings(num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8, ffn_size=32)
LEARNER = LearnerSettings(token_budget=20_000)
SETTINGS = ColdStartSettings(
    batch_size=2, headless_steps=3, steps=2, headless_pass_rate=0.9, pass_rate=0.9, floor=0.0, tasks_per_check=4
)
MODEL: Any = None
"""Lessons hand it to the exam and do nothing else with it."""


@pytest.fixture(scope="module")
def book() -> TraceBook:
    return read_book(captured_tasks())


# ---------------------------------------------------------------------------------------------------------------------
# Lessons
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class FakeClassroom:
    """An exam whose rates are told beforehand, and examples as they are."""

    rates: Iterator[Rates]
    looks: int = 0
    examples: list[Example] = field(default_factory=list)

    def exam(self, *_: object) -> FakeClassroom:
        return self

    def pass_rates(self, model: PreTrainedModel) -> Rates:
        self.looks += 1
        return next(self.rates)

    def encode(self, example: Example) -> Any:
        self.examples.append(example)
        return example


def skills(rates: Sequence[float]) -> Rates:
    return {
        Skill("pi", family): rate for family, rate in zip(("create", "append", "count", "relay"), rates, strict=True)
    }


def lessons_of(
    book: TraceBook, *rates: Sequence[float], head: bool = True, num_steps: int = 9, floor: float = 0.2
) -> tuple[Lessons, FakeClassroom]:
    classroom = FakeClassroom(iter([skills(one) for one in rates]))
    stage = Stage(name="whole", head=head, gate=Gate(pass_rate=0.5, floor=floor), num_steps=num_steps, check_every=3)
    return Lessons(stage, ColdStartSettings(batch_size=200), book, classroom), classroom  # type: ignore[arg-type]


LOW, LAGGING, GOOD = (0.0, 0.1, 0.2, 0.0), (0.9, 0.9, 0.9, 0.1), (0.6, 0.6, 0.6, 0.3)


def test_a_stage_ends_at_the_first_look_at_which_the_policy_is_good_enough(book: TraceBook) -> None:
    lessons, classroom = lessons_of(book, LOW, LAGGING, GOOD)
    ended = [lessons(step, MODEL) is None for step in range(7)]
    assert ended == [False] * 6 + [True]
    assert classroom.looks == 3


def test_a_stage_that_goes_on_after_a_kill_looks_before_it_teaches(book: TraceBook) -> None:
    lessons, classroom = lessons_of(book, LOW)
    assert lessons(4, MODEL) is not None
    assert classroom.looks == 1


def test_a_stage_whose_steps_are_used_up_ends_where_no_family_is_below_the_floor(book: TraceBook) -> None:
    lessons, _ = lessons_of(book, (0.2, 0.3, 0.3, 0.4), num_steps=4)
    assert lessons(4, MODEL) is None
    lessons, _ = lessons_of(book, LAGGING, num_steps=4)
    with pytest.raises(UserError, match=r"after 4 whole steps .*relay 0\.10.* below cold_start\.floor"):
        lessons(4, MODEL)


def test_what_the_policy_is_weak_in_is_practised_more_and_nothing_is_given_up(book: TraceBook) -> None:
    lessons, classroom = lessons_of(book, (0.0, 0.5, 1.0, 0.0))
    lessons(0, MODEL)
    words = ("Create", "Append", "Count", "Read")
    asked = Counter(
        next(word for word in words if f"<task>{word}" in one.conversation.messages[1].text)
        for one in classroom.examples
    )
    assert asked["Create"] > 1.3 * asked["Append"] > 1.3 * 4 * asked["Count"] > 0


def test_the_examples_of_a_step_share_their_head_and_those_of_different_steps_have_different_days(
    book: TraceBook,
) -> None:
    lessons, classroom = lessons_of(book, LOW, LOW)
    heads = []
    for step in (0, 1, 2):
        classroom.examples.clear()
        lessons(step, MODEL)
        (head,) = {one.conversation.messages[0].text for one in classroom.examples}
        heads.append(head)
    assert len({*heads, SYSTEM}) == 4


def test_the_first_stage_has_no_head(book: TraceBook) -> None:
    lessons, classroom = lessons_of(book, LOW, head=False)
    lessons(0, MODEL)
    assert not any(one.conversation.tools for one in classroom.examples)
    assert {one.conversation.messages[0].role for one in classroom.examples} == {"user"}
    assert [stage.head for stage in plan_stages(SETTINGS)] == [False, True]


def test_the_first_stage_has_the_skills_of_one_harness_for_nothing_in_it_tells_them_apart() -> None:
    book = read_book([*captured_tasks(("count",), harness="pi"), *captured_tasks(("count",), harness="codex")])
    first, second = plan_stages(SETTINGS)
    assert book_of(first, book).skills == (Skill("pi", "count"),)
    assert book_of(second, book).skills == (Skill("pi", "count"), Skill("codex", "count"))


@dataclass
class Learning(FakeClassroom):
    """An exam of a policy that is another with each of its steps, whose number stands for it."""

    def pass_rates(self, model: Any) -> Rates:
        return skills([model * factor % 1 * 0.4 for factor in (0.3, 0.37, 0.61, 0.83)])


@pytest.mark.parametrize("check_every", [1, 3, 7, 60])
def test_who_goes_on_from_a_checkpoint_practises_what_the_uninterrupted_does(book: TraceBook, check_every: int) -> None:
    settings = dataclasses.replace(SETTINGS, batch_size=50, check_every=check_every, steps=400, headless_steps=400)
    for stage in plan_stages(settings):
        resumed_at = checkpoint_interval(stage)
        assert resumed_at >= 50
        through, again = (Lessons(stage, settings, book, Learning(iter(()))) for _ in range(2))  # type: ignore[arg-type]
        batches = [through(step, step) for step in range(resumed_at + 9)]  # type: ignore[arg-type]
        assert [again(step, step) for step in range(resumed_at, resumed_at + 9)] == batches[resumed_at:]  # type: ignore[arg-type]


def test_the_same_step_has_the_same_examples(book: TraceBook) -> None:
    batches = [lessons_of(book, LOW)[0](0, MODEL) for _ in range(2)]
    assert batches[0] == batches[1]


# ---------------------------------------------------------------------------------------------------------------------
# The whole
# ---------------------------------------------------------------------------------------------------------------------


def make(settings: ColdStartSettings, book: TraceBook, folder: Path) -> None:
    make_policy(settings, SMALL, LEARNER, book, folder=folder / "lessons", output=folder / "policy")


def test_names_and_words_become_single_tokens_and_the_chat_format_reads_them(book: TraceBook, tmp_path: Path) -> None:
    write_tokenizer(sample_examples(book, 0), tmp_path / "tokenizer", vocab_size=1280)
    renderer = ChatRenderer(tmp_path / "tokenizer", renderer="qwen3", thinking=False)
    tree = encode_example(renderer, book.draw(Skill("pi", "create"), random.Random(1), "heldout"), "one")
    command = next(node for node in tree.nodes if node.sampled).token_ids
    words = [renderer.decode([token]) for token in command]
    start = words.index("echo")
    assert words[:2] == ["<tool_call>", "\n"]
    assert len(words[start : words.index(".")]) == 5  # echo, two words, >, the name of the file
    assert not list(tmp_path.glob(".*"))


def test_a_cold_start_leaves_a_policy_and_a_second_one_with_its_seed_the_same(book: TraceBook, tmp_path: Path) -> None:
    digests = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        make(SETTINGS, book, folder)
        policy = read_policy(folder / "policy")
        assert (policy.step, policy.renderer, policy.thinking) == (0, "qwen3", False)
        digests.append(policy.digest)
    assert digests[0] == digests[1]
    assert digests[0] != read_policy(tmp_path / "a/lessons/headless").digest


def test_what_a_killed_cold_start_has_done_is_not_done_again(book: TraceBook, tmp_path: Path) -> None:
    make(SETTINGS, book, tmp_path)
    whole = read_policy(tmp_path / "policy").digest
    (tmp_path / "policy").rename(tmp_path / "first")
    parts = [
        tmp_path / "lessons" / part
        for part in ("tokenizer/tokenizer.json", "fresh/policy.json", "headless/policy.json")
    ]
    before = [part.stat().st_mtime_ns for part in parts]
    make(SETTINGS, book, tmp_path)
    assert [part.stat().st_mtime_ns for part in parts] == before
    assert read_policy(tmp_path / "policy").digest == whole


@dataclass
class MortalBook:
    """A book whose reader is killed once `log` has more than `num_steps` steps."""

    book: TraceBook
    log: Path
    num_steps: int

    @property
    def skills(self) -> Any:
        return self.book.skills

    @property
    def of_one_harness(self) -> MortalBook:
        return self

    def draw(self, *what: Any) -> Example:
        if self.log.exists() and self.log.read_text().count("\n") > self.num_steps:
            raise Killed
        return self.book.draw(*what)


def test_a_cold_start_that_was_killed_ends_with_the_same_policy(book: TraceBook, tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, headless_steps=1, steps=53, lr=1e-2)
    checkpoints, log = (tmp_path / f"killed/lessons/whole-{kind}" for kind in ("checkpoints", "metrics/metrics.csv"))
    make(settings, book, tmp_path / "through")
    with pytest.raises(Killed):
        make(settings, MortalBook(book, log, num_steps=52), tmp_path / "killed")  # type: ignore[arg-type]
    assert [path.name for path in checkpoints.iterdir()] == ["step-000050.ckpt"]
    make(settings, book, tmp_path / "killed")
    assert read_policy(tmp_path / "killed/policy").digest == read_policy(tmp_path / "through/policy").digest


def test_a_policy_that_stays_below_the_floor_is_not_published(book: TraceBook, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"after 3 headless steps"):
        make(dataclasses.replace(SETTINGS, floor=0.5), book, tmp_path)
    assert not (tmp_path / "policy").exists()
    assert not (tmp_path / "lessons/headless").exists()


def test_a_tiny_cold_start_teaches_the_form_of_a_call(book: TraceBook, tmp_path: Path) -> None:
    make(dataclasses.replace(SETTINGS, batch_size=8, headless_steps=40, lr=1e-2), book, tmp_path)
    rows = (tmp_path / "lessons/headless-metrics/metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("train/loss")
    losses = [float(row.split(",")[column]) for row in rows[1:]]
    assert len(losses) == 40
    assert losses[-1] < 0.3 * losses[0]
    assert json.loads((tmp_path / "policy/policy.json").read_text())["step"] == 0
