"""Images of tasks' own, built by the real Apptainer without a network, and two tasks of one plan that stand on them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from clawhpc.config import RunConfig
from clawhpc.harness.registry import make_harness
from clawhpc.harness.whitebox import WhiteboxSettings
from clawhpc.images import build_images
from clawhpc.ledger import Ledger, remove_tree
from clawhpc.paths import RunPaths
from clawhpc.proxy.respond import Responder, ScriptedResponder
from clawhpc.records import Conversation, GroupPlan, Limits, Outcome, Reply, StepPlan, TaskSpec
from clawhpc.sandbox.by_image import open_images
from clawhpc.sandbox.settings import SandboxSettings
from clawhpc.store import publish_plan, read_rollouts
from clawhpc.tasks.families import ShellStep
from clawhpc.tasks.oracle import shell_call
from clawhpc.tasks.sets import TaskSettings, load_task_sets
from clawhpc.worker.run import Worker
from tests.fakes.records import make_group
from tests.fakes.task_sets import TASK_TOML, lay_harbor, write_files
from tests.fakes.worker import FakeDesk, plan_of, work_through, worker_spec
from tests.sandbox_parts import KINDS, working_sandbox

pytestmark = [pytest.mark.anyio, pytest.mark.apptainer]

TOOL = """\
ARG VERSION=own
FROM debian:${VERSION} AS base
ARG NAME=world
ENV GREETING="hello $NAME" PATH=/opt/tool/bin:$PATH
SHELL ["/bin/bash", "-c"]
WORKDIR /app
COPY helper /opt/tool/bin/helper
RUN chmod 755 /opt/tool/bin/helper && \\
    # a comment within
    git init -q . && git config user.name a && git config user.email a@b && \\
    git add -A && git commit -q --allow-empty -m 'the beginning of all'
RUN <<EOF
[[ $NAME == world ]] && echo '{{ x }} $NAME' > .git/info/exclude
ln -s /opt/tool tool
echo numbers.txt >> .git/info/exclude; echo tool >> .git/info/exclude
echo gone > /tmp/file
EOF
RUN ["/bin/sh", "-c", "test \\"$PWD $GREETING\\" = '/app hello world' && cat /tmp/file"]
COPY numbers.txt .
"""
OTHER = "FROM debian:own\nWORKDIR /work\nCOPY . /data/all\nRUN echo other > /etc/other && echo two > lines\n"
BAD = "FROM debian:own\nWORKDIR /app\nRUN true\nRUN echo trying && \\\n  false\n"
VERIFY_TOOL = """\
helper > /tmp/helped
[ "$(git status --porcelain)" = "?? said" ] && [ "$(git log --format=%s)" = "the beginning of all" ] &&
  [ "$(readlink tool)" = /opt/tool ] && [ "$(cat numbers.txt)" = 7 ] && [ ! -e /tmp/file ] &&
  [ "$GREETING" = "hello world" ] && cmp said /tmp/helped && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""
VERIFY_OTHER = """\
[ "$(cat lines)" = two ] && cmp said /etc/other && [ -f /data/all/numbers.txt ] && ! command -v helper && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""
PROXY = "http://me:secret@localhost:1"
COMMAND = "(helper || cat /etc/other) > said"


def solve(conversation: Conversation) -> Reply:
    """What a model says that knows what to do."""
    if any(message.tool_calls for message in conversation.messages):
        return Reply(text="Done.")
    call = shell_call(conversation.tools, ShellStep(command=COMMAND), call_id="call_0")
    return Reply(tool_calls=(call,), finish_reason="tool_calls")


@dataclass
class SolvingDesk(FakeDesk):
    """Answers as `solve` says."""

    def responder(self, plan: StepPlan, group: GroupPlan) -> Responder:
        return ScriptedResponder(script=solve)


@pytest.fixture(scope="module")
def settings(image: Path, cache_dir: Path) -> Iterator[TaskSettings]:
    """A set of three tasks, and the images of two."""
    folder = Path(tempfile.mkdtemp(prefix="claw-", dir="/tmp"))
    files = {"helper": "#!/bin/sh\necho helped\n", "numbers.txt": "7\n"}
    for name, dockerfile, script in (
        ("bad", BAD, "echo"),
        ("other", OTHER, VERIFY_OTHER),
        ("tool", TOOL, VERIFY_TOOL),
    ):
        root = lay_harbor(folder / "set", name, dockerfile=dockerfile, script=script, toml=TASK_TOML)
        write_files(root / "environment", files)
    settings = TaskSettings(folder=f"{folder}/set", images=f"{folder}/images", bases={"debian:own": str(image)})
    config = RunConfig(cache_dir=str(cache_dir), scratch_dir=f"{folder}/scratch", tasks=settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("http_proxy", PROXY)
        assert build_images(config, at_once=1) == 1, "one cannot be built"
    yield settings
    remove_tree(folder)


def test_what_cannot_be_built_is_told_with_the_line_of_the_dockerfile(
    settings: TaskSettings, cache_dir: Path, ledger_root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig(cache_dir=str(cache_dir), scratch_dir=str(ledger_root), tasks=settings)
    assert build_images(config, at_once=1) == 1
    said, _ = capfd.readouterr()
    assert f"\n{settings.folder}/bad/environment/Dockerfile:4: RUN echo trying && false\n" in said
    assert "    trying\n" in said
    assert said.count("building ") == 1, "the others are there"
    assert os.listdir(ledger_root) == []


def test_a_password_of_the_builder_is_in_no_image_and_no_log(settings: TaskSettings) -> None:
    noted = [*Path(settings.images or "").glob("*/.clawhpc/env"), *Path(settings.images or "").glob("*.log")]
    assert len(noted) == 5
    assert not any(PROXY in path.read_text() for path in noted)


@pytest.mark.parametrize("kind", KINDS)
async def test_harness_and_verifier_of_each_task_stand_on_its_own_image_and_begin_with_its_workspace(
    kind: str, settings: TaskSettings, cache_dir: Path, ledger: Ledger, tmp_path: Path
) -> None:
    tasks = {task.task_id: task for task in load_task_sets(settings, tmp_path / "cache").train}
    assert sorted(tasks) == ["ours/other", "ours/tool"]
    sandbox_settings = SandboxSettings(kind=kind)  # type: ignore[arg-type]
    own = await working_sandbox(sandbox_settings, ledger, cache_dir)
    spec = worker_spec(tmp_path)
    worker = Worker(
        replace(spec, sandbox=sandbox_settings, limits=Limits(deadline_s=90.0, reserve_s=30.0)),
        "w0",
        sandboxes=open_images(own, sandbox_settings, ledger),
        harnesses={"pi": make_harness("whitebox", WhiteboxSettings(), cache_dir / "harness")},
        desk=SolvingDesk(),
        scratch=ledger.scratch,
        environment=ledger.environment,
    )
    paths = RunPaths(tmp_path / "run")
    publish_plan(paths, replace(plan_of(), groups=tuple(map(group_of, tasks.values()))))
    await work_through(paths, worker)
    records = {record.key.task_id: record for record in read_rollouts(paths)}
    assert {name: (record.outcome, record.detail) for name, record in records.items()} == dict.fromkeys(
        tasks, (Outcome.COMPLETED, "")
    )
    assert {name: record.verdict and record.verdict.reward for name, record in records.items()} == dict.fromkeys(
        tasks, 1.0
    )


def group_of(task: TaskSpec) -> GroupPlan:
    return make_group(task.task_id, num_samples=1, task=task)
