import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawhpc.errors import VerifierError
from clawhpc.records import Verdict
from clawhpc.verify.reward import MAX_FILE_BYTES, read_reward_files
from tests.fakes.sandbox import result


def read(folder: Path, *, exit_code: int = 0, timed_out: bool = False) -> Verdict:
    return read_reward_files(folder, "test.sh", "t", result(exit_code=exit_code, timed_out=timed_out, stderr="why"))


def write(folder: Path, *, text: str | None = None, json: str | None = None) -> Path:
    if text is not None:
        (folder / "reward.txt").write_text(text)
    if json is not None:
        (folder / "reward.json").write_text(json)
    return folder


@pytest.mark.parametrize(("text", "reward"), [("1", 1.0), ("0\n", 0.0), (" 0.5 \n", 0.5), ("1e0", 1.0), ("+.25", 0.25)])
def test_a_plain_number_is_the_reward_whatever_the_exit_code(tmp_path: Path, text: str, reward: float) -> None:
    assert read(write(tmp_path, text=text), exit_code=1) == Verdict(reward=reward)


def test_named_numbers_are_the_breakdown_and_the_one_named_reward_is_the_reward(tmp_path: Path) -> None:
    write(tmp_path, json='{"reward": 0.5, "speed": 12, "right": 1, "note": "fast", "done": true, "deep": {"a": 1}}')
    assert read(tmp_path) == Verdict(reward=0.5, breakdown={"speed": 12.0, "right": 1.0})


@pytest.mark.parametrize(
    ("text", "json", "reward"),
    [
        ("0", '{"reward": 1}', 0.0),
        ("1", '{"reward": 0.25}', 0.25),
        ("1", '{"right": 0.75}', 1.0),
        ("1", '{"right": 7}', 1.0),
        ("0", '{"right": 0.75}', 0.0),
        ("0.5", '{"right": 0.75, "fast": 0.25}', 0.5),
        ("0.5", "{}", 0.5),
    ],
)
def test_of_two_files_with_a_reward_the_smaller_counts_for_one_of_them_may_be_planted(
    tmp_path: Path, text: str, json: str, reward: float
) -> None:
    verdict = read(write(tmp_path, text=text, json=json))
    assert verdict.reward == reward
    assert ("right" in verdict.breakdown) is ("right" in json)


@pytest.mark.parametrize(
    ("text", "json"),
    [
        ("0.5", "garbage"),
        ("0.5", "[1]"),
        ("0.5", '{"reward": 7}'),
        ("0.5", '{"reward": 1e999}'),
        ("garbage", '{"reward": 0.5}'),
        ("7", '{"reward": 0.5}'),
    ],
)
def test_of_two_files_one_without_a_reward_takes_none_from_the_other(tmp_path: Path, text: str, json: str) -> None:
    """Else a program of the workspace could void a verdict of 0."""
    assert read(write(tmp_path, text=text, json=json)) == Verdict(reward=0.5)


def test_nor_does_a_link(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").symlink_to("/nowhere")
    assert read(write(tmp_path, json='{"reward": 0.5}')) == Verdict(reward=0.5)


def test_the_only_number_is_the_reward_under_whatever_name(tmp_path: Path) -> None:
    assert read(write(tmp_path, json='{"accuracy": 0.25}')) == Verdict(reward=0.25, breakdown={"accuracy": 0.25})


@given(st.floats(0, 1))
def test_every_reward_is_read_back(reward: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert read(write(Path(folder), text=f"{reward!r}\n")).reward == reward
        assert read(write(Path(folder), json=f'{{"reward": {reward!r}}}')).reward == reward


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, r"wrote neither reward\.json nor reward\.txt"),
        ({"text": ""}, r"reward\.txt holds '', not a number"),
        ({"text": "pass"}, r"reward\.txt holds 'pass', not a number"),
        ({"text": "nan"}, r"reward\.txt holds 'nan', not a number"),
        ({"text": "2", "json": '{"reward": 1.5}'}, r"the reward 1\.5 is not in \[0, 1\]; the reward 2\.0 is not in"),
        ({"text": "pass", "json": '{"right": 1}'}, r"reward\.json names 1 numbers and .*; reward\.txt holds 'pass'"),
        ({"text": "1.5"}, r"the reward 1\.5 is not in \[0, 1\]"),
        ({"json": ""}, "truncated"),
        ({"json": "[1]"}, r"reward\.json is not an object"),
        ({"json": "{}"}, r"reward\.json has no number"),
        ({"json": '{"reward": true}'}, r"reward\.json has no number"),
        ({"json": '{"reward": -1}'}, r"the reward -1\.0 is not in"),
        ({"json": '{"right": 1, "fast": 0}'}, r"reward\.json names 2 numbers and none of them reward"),
    ],
)
def test_without_a_number_from_0_to_1_it_is_a_failure_never_0(tmp_path: Path, files: dict[str, str], why: str) -> None:
    with pytest.raises(VerifierError, match=rf"^test\.sh of t .*{why}.*exit code 3; .*stderr: 'why'"):
        read(write(tmp_path, **files), exit_code=3)


def test_a_script_that_was_stopped_has_no_reward_though_it_wrote_one(tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match="was stopped after"):
        read(write(tmp_path, text="1"), timed_out=True)


def test_only_small_regular_files_are_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("1")
    folder = tmp_path / "rewards"
    folder.mkdir()
    (folder / "reward.txt").symlink_to(outside)
    with pytest.raises(VerifierError, match="symbolic link"):
        read(folder)
    (folder / "reward.txt").unlink()
    os.mkfifo(folder / "reward.txt")
    with pytest.raises(VerifierError, match=r"reward\.txt is no regular file"):
        read(folder)
    (folder / "reward.txt").unlink()
    (folder / "reward.txt").mkdir()
    with pytest.raises(VerifierError, match=r"reward\.txt"):
        read(folder)
    (folder / "reward.txt").rmdir()
    (folder / "reward.txt").write_text("1" + " " * MAX_FILE_BYTES)
    with pytest.raises(VerifierError, match="has more than"):
        read(folder)
