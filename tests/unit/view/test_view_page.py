"""The page as a whole: complete, self-contained, and deaf to what harnesses write."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from clawhpc.paths import RunPaths
from clawhpc.view.__main__ import latest_policy, load_decode, main, spell_ids
from clawhpc.view.page import ViewSettings, build_page
from tests.fakes.chat_tokenizer import write_tokenizer
from tests.fakes.disk import largest_file
from tests.fakes.run import HOSTILE, decode, write_run


class Outline(HTMLParser):
    """The elements of a page, its attributes, and what its scripts hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.prose = ""
        self._open: dict[str, str] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "script":
            self._open = {name: value or "" for name, value in attrs}
            self.scripts.append((self._open, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is None:
            self.prose += data
        else:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data

    def data(self, **wanted: str) -> object:
        (text,) = (text for attributes, text in self.scripts if wanted.items() <= attributes.items())
        return json.loads(text)


def build(paths: RunPaths, num_trees: int = 1000) -> tuple[str, Outline]:
    page = build_page(paths, decode, ViewSettings(num_trees=num_trees))
    return page, Outline(page)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    return write_run(tmp_path_factory.mktemp("run"))


def test_the_page_holds_every_rollout_its_tree_and_the_curves(run: RunPaths) -> None:
    page, outline = build(run)
    rows = outline.data(id="data-rows")
    assert isinstance(rows, list)
    assert len(rows) == 4 * 12 + 2 * 6
    details = [attributes["data-rollout"] for attributes, _ in outline.scripts if "data-rollout" in attributes]
    assert sorted(details) == sorted(row[0] for row in rows)
    for title in (
        "By harness",
        "Reward",
        "Entropy",
        "Clip share",
        "Time per part",
        "How rollouts ended",
        "learning_rate",
    ):
        assert title in outline.prose
    assert page.count('class="chart"') == len(outline.data(id="data-hover"))  # type: ignore[arg-type]


def test_the_page_fetches_nothing(run: RunPaths) -> None:
    _, outline = build(run)
    links = [
        value for name, value in outline.attributes if name in ("src", "href", "srcset", "action", "data", "poster")
    ]
    assert set(links) == {"#"}
    assert not {"link", "iframe", "img", "object", "embed", "base", "video", "audio"} & set(outline.tags)
    assert not re.search(r"url\(|@import|//[a-z0-9-]+\.[a-z]", outline.prose)
    (script,) = (text for attributes, text in outline.scripts if "type" not in attributes)
    assert not re.search(
        r"https?:|fetch\(|XMLHttpRequest|import\(|\.innerHTML|insertAdjacentHTML|document\.write|eval\(", script
    )


def test_only_the_pages_own_script_may_run(run: RunPaths) -> None:
    _, outline = build(run)
    (script,) = (text for attributes, text in outline.scripts if "type" not in attributes)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (value for name, value in outline.attributes if name == "content" and "default-src" in value)
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_hostile_texts_stay_texts(run: RunPaths) -> None:
    page, outline = build(run)
    texts = outline.data(id="data-texts")
    assert isinstance(texts, list)
    assert HOSTILE in texts, "it is there, whole"
    assert HOSTILE not in page, "and nowhere as it was written"
    assert "<img" not in page
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    assert all(attributes.get("type") == "application/json" for attributes, _ in outline.scripts[:-1])


def test_hostile_names_and_configurations_are_escaped(tmp_path: Path) -> None:
    root = tmp_path / "<img src=x onerror=alert(1)>"
    root.mkdir()
    (root / "config.yaml").write_text(HOSTILE)
    page, outline = build(RunPaths(root))
    assert "<img" not in page
    assert HOSTILE in outline.prose


def test_a_big_run_holds_some_trees_and_says_which_are_left_out(run: RunPaths) -> None:
    page, outline = build(run, num_trees=10)
    assert sum("data-rollout" in attributes for attributes, _ in outline.scripts) == 10
    assert "10 of 60 rollouts are on this page" in outline.prose
    assert len(page) < len(build(run)[0])


def test_an_empty_run_has_a_page_that_says_so(tmp_path: Path) -> None:
    _, outline = build(RunPaths(tmp_path))
    assert "Nothing has been planned yet." in outline.prose
    assert "No rollout has ended yet." in outline.prose
    assert outline.data(id="data-rows") == []


def test_a_run_in_progress_says_what_it_waits_for(tmp_path: Path) -> None:
    _, outline = build(write_run(tmp_path, steps=2, unfinished=5))
    assert "Rollouts collected for train step 1: 7 of 12." in outline.prose
    assert "of 30 planned" in outline.prose


def test_the_command_writes_the_page_and_prints_where(run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run.root), "--trees", "3"])
    assert capsys.readouterr().out == f"{run.page}\n"
    assert "⟨" in run.page.read_text(), "without a tokenizer, tokens are numbers"


def test_the_command_reads_tokens_with_the_runs_latest_tokenizer(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step in (2, 10):
        write_tokenizer(paths.policy(step))
    assert latest_policy(paths) == paths.policy(10)
    ids = write_tokenizer(tmp_path / "same").encode("größe 🙂 <|im_end|>").ids
    assert load_decode(paths.policy(10))(ids) == "größe 🙂 <|im_end|>"


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """Exit code, and what is said."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code, capsys.readouterr().err


def test_the_command_names_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = f"{tmp_path}/nothing"
    assert refusal(capsys, folder) == (2, f"clawhpc: {folder}: no such run folder\n")


def test_the_command_names_a_folder_that_is_no_run_and_leaves_it_alone(
    run: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, run.root.parent):
        message = f"clawhpc: {folder}: no run here; a run's folder has a config.yaml\n"
        assert refusal(capsys, str(folder)) == (2, message)
        assert not RunPaths(folder).page.exists()


def test_bytes_that_are_no_text_in_the_configuration_are_shown_as_such(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"experiment: caf\xe9\n")
    assert "experiment: caf\ufffd" in build(RunPaths(tmp_path))[1].prose


def test_the_command_names_a_broken_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_run(tmp_path, steps=1)
    for command, folder in (([], paths.policy(7)), (["--policy", str(tmp_path / "own")], tmp_path / "own")):
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text("{")
        code, said = refusal(capsys, str(tmp_path), *command)
        (line,) = said.splitlines()
        assert code == 2
        assert line.startswith(f"clawhpc: {folder}/tokenizer.json: not a fast tokenizer: ")
    assert not paths.page.exists()


def test_the_command_says_in_one_line_that_the_page_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = write_run(tmp_path, steps=1)
    paths.page.mkdir()
    assert refusal(capsys, str(tmp_path)) == (1, f"clawhpc: Is a directory: {paths.page}\n")
    paths.page.rmdir()
    with largest_file(1000):
        assert refusal(capsys, str(tmp_path)) == (1, f"clawhpc: File too large: {paths.page}\n")
    assert not paths.page.exists()


def test_ids_are_spelt_when_nothing_decodes_them() -> None:
    assert spell_ids((1, 23)) == "⟨1⟩⟨23⟩"
