import pytest

from clawhpc.check.report import SHOWN, Findings, in_units, report
from clawhpc.check.survey import Spread, Survey, Untouched
from clawhpc.records import Limits

LIMITS = Limits(deadline_s=120, reserve_s=20, settle_s=2)
"""They leave a harness 100 s, and a verifier 13."""


def survey(**fields: object) -> Survey:
    values: dict[str, object] = {
        **{"folder": "/set", "format": "Ours", "num_tasks": 3, "faults": (), "notes": {}, "verifiers": {"script": 3}},
        **{"with_inputs": 1, "input_files": 2, "input_bytes": 1500, "with_mcp": 0, "with_mcp_host": 0},
        **{"with_image": 0, "num_images": 0},
        **{"instruction_chars": Spread(least=1, median=2, most=3), "run_s": None, "duplicates": ()},
    }
    return Survey(**{**values, **fields})  # type: ignore[arg-type]


def findings(*untouched: Untouched, **fields: object) -> Findings:
    values: dict[str, object] = {
        **{"sets": (survey(),), "shared_ids": (), "untouched": untouched, "rubrics_not_asked": 0, "untouched_s": 2.0},
        "places": {name: f"/set/{name}/reward.sh" for name in ("a", "b", "c")},
    }
    return Findings(**{**values, **fields})  # type: ignore[arg-type]


def text(found: Findings) -> str:
    return "\n".join(report(found, LIMITS))


def test_nothing_wrong_is_said_in_so_many_words() -> None:
    found = findings(Untouched(task_id="a", reward=0.0))
    assert found.problems == ()
    assert text(found).endswith("No faults.")
    assert "2 files, 1.5 kB" in text(found)
    assert "in 1 tasks, 2 s: nothing in 1, points in 0, no verdict in 0" in text(found)


def test_all_points_for_nothing_and_a_verifier_that_fails_are_faults_some_points_are_named() -> None:
    found = findings(
        Untouched(task_id="a", reward=1.0),
        Untouched(task_id="b", reward=0.25, breakdown={"there": 1.0, "right": 0.0}),
        Untouched(task_id="c", reward=None, failure="broke\nin two"),
    )
    assert found.problems == (
        "/set/c/reward.sh: the verifier of 'c' fails on the untouched workspace: broke in two",
        "/set/a/reward.sh: the untouched workspace of 'a' earns all there is",
    )
    assert "  free          1  a\n  free          0.25  b  (there 1)\n" in text(found)


def test_what_verifiers_looked_for_in_vain_is_said_with_how_many_and_is_no_fault() -> None:
    found = findings(
        *(Untouched(task_id=name, reward=0.0, lacking=("uvx", "a network")) for name in ("a", "b", "c", "d")),
        Untouched(task_id="e", reward=0.0, lacking=("jq",)),
    )
    assert (
        "  lacking       uvx, which the verifiers of 4 tasks looked for: a, b, c and 1 more\n"
        "  lacking       a network, which the verifiers of 4 tasks looked for: a, b, c and 1 more\n"
        "  lacking       jq, which the verifiers of 1 tasks looked for: e\n"
    ) in text(found)
    assert found.problems == ()


def test_faults_of_all_sets_stand_one_per_line_at_the_end() -> None:
    sets = (survey(faults=("/set/x/task.toml: steps",)), survey(faults=("/two/y.md: id",)))
    found = findings(sets=sets, shared_ids=("b",))
    assert text(found).endswith(
        "3 faults\n  /set/x/task.toml: steps\n  /two/y.md: id\n  /set/b/reward.sh: task_id 'b' is in another set too"
    )


def test_what_is_named_one_by_one_is_cut() -> None:
    duplicates = tuple((f"a{number}", f"b{number}") for number in range(SHOWN + 5))
    shown = text(findings(sets=(survey(duplicates=duplicates),)))
    assert shown.count("same task") == SHOWN + 1
    assert "and 5 more" in shown


def test_a_fault_of_many_tasks_is_said_once_with_how_many_and_some_of_them() -> None:
    alike = tuple(f"/set/{number}/Dockerfile:{number}: RUN is not carried out" for number in range(2000))
    found = findings(sets=(survey(faults=("/set/x/task.toml: steps", *alike)),))
    assert found.problems == ("/set/x/task.toml: steps", *alike)
    assert text(found).endswith(
        "2001 faults, of 2 kinds\n"
        "  /set/x/task.toml: steps\n"
        "  2000 times: /set/0/Dockerfile:0: RUN is not carried out\n"
        "    also /set/1/Dockerfile:1, /set/2/Dockerfile:2, /set/3/Dockerfile:3 and 1996 more"
    )


def test_verifiers_that_fail_alike_but_for_the_name_of_their_task_are_one_kind() -> None:
    why = "reward.sh of {} ended with exit code {}"
    found = findings(
        Untouched(task_id="a", reward=None, failure=why.format("a", 1)),
        Untouched(task_id="b", reward=None, failure=why.format("b", 127)),
        Untouched(task_id="c", reward=None, failure=why.format("c", 1)),
    )
    assert text(found).endswith(
        "3 faults, of 2 kinds\n"
        "  2 times: /set/a/reward.sh: the verifier of 'a' fails on the untouched workspace: "
        "reward.sh of a ended with exit code 1\n"
        "    also /set/c/reward.sh\n"
        "  /set/b/reward.sh: the verifier of 'b' fails on the untouched workspace: "
        "reward.sh of b ended with exit code 127"
    )


def test_more_time_than_the_limits_leave_is_said() -> None:
    spread = Spread(least=60, median=90, most=900)
    assert "60 to 900 (median 90) s for the harness; limits.deadline_s leaves 100 s" in text(
        findings(sets=(survey(run_s=spread),))
    )


def test_how_long_verifiers_took_is_said_and_whether_a_rollout_has_as_much() -> None:
    quick, slow = Untouched(task_id="a", reward=0.0, verify_s=1.04), Untouched(task_id="b", reward=0.0, verify_s=13.2)
    assert "  time          1 to 1 (median 1) s for the verifier\n" in text(findings(quick))
    assert "1 to 13.2 (median 7.1) s for the verifier; limits.reserve_s leaves 13 s" in text(findings(quick, slow))


def test_servers_that_need_leave_to_run_on_the_host_are_said() -> None:
    assert "needs tasks.mcp" not in text(findings())
    assert "in 3 tasks; in 2 on the host, which needs tasks.mcp.allow_host=true" in text(
        findings(sets=(survey(with_mcp=3, with_mcp_host=2),))
    )


def test_rubrics_that_nobody_was_asked_about_are_said() -> None:
    assert "The rubrics of 7 tasks were not asked about: no judge is set" in text(findings(rubrics_not_asked=7))


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (2.5e15, "2.5e+03 TB")]
)
def test_sizes_have_three_digits(size: float, shown: str) -> None:
    assert in_units(int(size)) == shown


def test_images_of_tasks_own_are_counted() -> None:
    assert "  images        2, of 3 tasks; " in text(findings(sets=(survey(with_image=3, num_images=2),)))
    assert "images " not in text(findings())
