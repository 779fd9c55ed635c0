"""A whole run on disk, made up: trees of every shape, texts of every kind, curves that rise. No engine, no harness."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from clawhpc.paths import RunPaths
from clawhpc.records import (
    CallRecord,
    CallRole,
    ExecResult,
    GroupPlan,
    Message,
    Outcome,
    Reply,
    RolloutRecord,
    StepPlan,
    Timings,
    Tool,
    ToolCall,
    Usage,
)
from clawhpc.store import publish_plan, publish_rollout, seal_group
from tests.fakes.records import make_group, make_record
from tests.fakes.session import Ids, Session

HOSTILE = (
    """</script><script>document.title="owned"</script><img src=x onerror="document.title='owned'"> & "quoted" 'too'"""
)
SYSTEM = "You are a careful agent in a workspace.\n" + "Read before you write. Say what you did. " * 40
TOOLS = (Tool(name="Bash", description="run", parameters={}), Tool(name="Read", description="read", parameters={}))
History = tuple[Ids | int, ...]


def encode(text: str) -> Ids:
    """One token per byte: as simple as a tokenizer can be, and characters span tokens."""
    return tuple(text.encode())


def decode(token_ids: Iterable[int]) -> str:
    """The inverse of `encode`."""
    return bytes(token_ids).decode(errors="replace")


class Story:
    """A session told in texts: prompts and replies as a chat template would write them."""

    def __init__(self, chance: random.Random) -> None:
        self.session = Session()
        self._chance = chance

    def head(self, ask: str, system: str = SYSTEM) -> History:
        return (encode(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{ask}<|im_end|>\n"), CUE)

    def call(
        self, history: History, reply: Reply, messages: tuple[Message, ...], role: CallRole = CallRole.MAIN
    ) -> int:
        """One call whose history is written in ids, with the same in text beside it."""
        call_id = self.session.call(*history, reply=encode(spell(reply)), role=role)
        record = self.session.calls[call_id]
        tokens = record.tokens
        assert tokens is not None
        logprobs = tuple(-(abs(self._chance.gauss(0, 1)) ** 3) for _ in tokens.completion_ids)
        usage = Usage(
            input_tokens=len(self.session.prompt_ids[call_id]),
            output_tokens=len(tokens.completion_ids),
            cached_tokens=tokens.prefix_length,
        )
        self.session.calls[call_id] = replace(
            record,
            tokens=replace(tokens, sampling_logprobs=logprobs),
            reply=reply,
            new_messages=messages,
            tools=TOOLS if record.continues_id is None else (),
            usage=usage,
            duration_s=round(self._chance.uniform(0.3, 2.5), 3),
            engine_s=round(self._chance.uniform(0.1, 0.3), 3),
        )
        return call_id

    @property
    def calls(self) -> tuple[CallRecord, ...]:
        return tuple(self.session.calls)


CUE: Ids = encode("<|im_start|>assistant\n")


def spell(reply: Reply) -> str:
    thinking = f"<think>\n{reply.thinking}\n</think>\n\n" if reply.thinking else ""
    calls = "".join(
        f'\n<tool_call>\n{{"name": "{c.name}", "arguments": {c.arguments}}}\n</tool_call>' for c in reply.tool_calls
    )
    return f"{thinking}{reply.text}{calls}<|im_end|>"


def bash(command: str, text: str = "", thinking: str = "") -> Reply:
    arguments = f'{{"command": "{command}"}}'
    calls = (ToolCall(id="call_0", name="Bash", arguments=arguments),)
    return Reply(text=text, thinking=thinking, tool_calls=calls, finish_reason="tool_calls")


def answer(result: str) -> tuple[tuple[Message, ...], Ids]:
    """A tool's result, as message and as ids up to the next reply."""
    ids = encode(f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n") + CUE
    return (Message(role="tool", text=result, tool_call_id="call_0"),), ids


def opening(ask: str) -> tuple[Message, ...]:
    return (Message(role="system", text=SYSTEM), Message(role="user", text=ask))


def tell_plain(story: Story, ask: str, turns: int) -> None:
    """Call after call, each extending the last; one tool result is long."""
    history, messages = story.head(ask), opening(ask)
    for turn in range(turns):
        last = turn == turns - 1
        reply = (
            Reply(text="Done: the sum is in total.txt.")
            if last
            else bash(f"cat part-{turn}.csv", "I will look.", "Which file first?")
        )
        call_id = story.call(history, reply, messages)
        messages, ids = answer(f"id,amount\\n{turn},{turn * 7}\\n" * (60 if turn == 1 else 2))
        history = (*history, call_id, ids)


def tell_retries(story: Story, ask: str) -> None:
    """A retry, a regeneration that went another way, and an empty reply."""
    head = story.head(ask)
    first = story.call(head, bash("ls -la"), opening(ask))
    messages, ids = answer("notes.txt  größe.txt  名前.txt")
    story.call((*head, first, ids), bash("cat notes.txt", "I read the notes."), messages)
    story.call((*head, first, ids), Reply(text=""), messages)
    again = story.call((*head, first, ids), bash("wc -c größe.txt", "I measure größe.txt and 名前.txt 🙂."), messages)
    messages, ids_after = answer("1024 größe.txt")
    story.call((*head, first, ids, again, ids_after), Reply(text="größe.txt has 1024 bytes."), messages)


def tell_subagent(story: Story, ask: str) -> None:
    """The main loop starts a subagent, which runs while it waits; a title call comes first."""
    story.call(
        story.head("Give this chat a title", "You make titles."),
        Reply(text="Summing up"),
        opening("Give this chat a title"),
        CallRole.SIDE,
    )
    history = story.head(ask)
    task = ToolCall(id="call_0", name="Agent", arguments='{"prompt": "find the csv files", "run_in_background": false}')
    main = story.call(
        history, Reply(text="I ask a helper.", tool_calls=(task,), finish_reason="tool_calls"), opening(ask)
    )
    inner, messages = (
        story.head("find the csv files", "You are an agent for file search."),
        opening("find the csv files"),
    )
    for turn in range(3):
        call_id = story.call(inner, bash(f"find . -name part-{turn}"), messages, CallRole.SUBAGENT)
        messages, ids = answer(f"./data/part-{turn}.csv")
        inner = (*inner, call_id, ids)
    messages, ids = answer("Three files: part-0, part-1, part-2.")
    story.call((*history, main, ids), Reply(text="There are three files."), messages)


def tell_moving(story: Story, ask: str, turns: int) -> None:
    """A harness that moves its last message: a fork at every turn, with grafted copies."""
    history, messages = story.head(ask)[:-1], opening(ask)
    moving = encode("<|im_start|>user\n[internal context, 15:28 UTC]<|im_end|>\n") + CUE
    for turn in range(turns):
        call_id = story.call((*history, moving), bash(f"head -n {turn + 1} log.txt"), messages)
        messages, ids = answer(f"line {turn}: ok")
        history = (*history, CUE, call_id, ids[: -len(CUE)])


def tell_hostile(story: Story, ask: str) -> None:
    """A harness whose every text tries to leave its place."""
    head = story.head(HOSTILE)
    first = story.call(head, Reply(text=HOSTILE, thinking=HOSTILE), (Message(role="user", text=HOSTILE),))
    story.call((*head, first, encode(HOSTILE)), Reply(text=f"fine {ask}"), (Message(role="tool", text=HOSTILE),))


def make_calls(kind: int, ask: str, chance: random.Random) -> tuple[CallRecord, ...]:
    story = Story(chance)
    tellers = (
        lambda: tell_plain(story, ask, 2 + chance.randrange(4)),
        lambda: tell_retries(story, ask),
        lambda: tell_subagent(story, ask),
        lambda: tell_moving(story, ask, 5),
        lambda: tell_hostile(story, ask),
        lambda: story.session.fail(*story.head(ask)),
    )
    tellers[kind % len(tellers)]()
    return story.calls


FAILURES = (Outcome.SANDBOX_FAILED, Outcome.ENGINE_FAILED, Outcome.VERIFIER_FAILED)
ENDINGS = (Outcome.COMPLETED,) * 12 + (Outcome.HARNESS_EXIT, Outcome.TIMEOUT, Outcome.LIMIT, Outcome.OVER_BRANCHED)


def make_rollout(group: GroupPlan, sample: int, skill: float, chance: random.Random) -> RolloutRecord:
    """Sample `sample` of `group` by a policy that solves a task with probability `skill`."""
    failed = chance.random() < 0.03
    outcome = chance.choice(FAILURES if failed else ENDINGS)
    reward = None if failed else float(chance.random() < skill) * chance.choice((1.0, 1.0, 0.5))
    record = make_record(group, sample, reward, outcome=outcome)
    kind = chance.choice((0, 0, 1, 2, 3, 4, 5)) if record.sample else sample
    return replace(
        record,
        instruction=f"Sum the amounts in data/*.csv and write the total to total.txt ({group.key.task_id}).",
        calls=make_calls(kind, "Sum the amounts in data/*.csv.", chance),
        detail="" if outcome is Outcome.COMPLETED else f"{outcome}: rc 1 after {HOSTILE}",
        exec_result=ExecResult(
            exit_code=int(failed),
            stdout_tail='{"type":"result","is_error":false}\n' * 3,
            stderr_tail=HOSTILE if failed else "",
            wall_s=6.0,
            cpu_s=1.2,
            timed_out=outcome is Outcome.TIMEOUT,
        ),
        timings=Timings(
            started_at=1_700_000_000.0 + 60 * group.key.step + sample,
            boot_s=chance.uniform(0.2, 0.6),
            run_s=chance.uniform(3, 9),
            settle_s=chance.uniform(0, 0.3),
            verify_s=chance.uniform(0.2, 0.5),
            teardown_s=chance.uniform(0.1, 0.2),
            harness_cpu_s=chance.uniform(0.8, 1.6),
        ),
        dropped_leaves={"dead": 2} if kind == 1 else {"role": 2} if kind == 2 else {},
    )


def make_step(phase: str, step: int, tasks: int, samples: int) -> StepPlan:
    groups = tuple(
        make_group(
            f"{('sum', 'rename', 'merge')[task % 3]}-files-{task:03d}",
            phase=phase,
            step=step,
            harness=("claude_code", "pi")[task % 2],
            num_samples=samples,
        )  # type: ignore[arg-type]
        for task in range(tasks)
    )
    return StepPlan(phase=phase, step=step, policy_step=step, temperature=1.0, groups=groups)  # type: ignore[arg-type]


def write_run(
    root: Path, *, steps: int = 4, tasks: int = 3, samples: int = 4, unfinished: int = 0, seed: int = 0
) -> RunPaths:
    """Write a run of `steps` steps with an evaluation before and after; the last step lacks `unfinished` rollouts."""
    paths, chance = RunPaths(root), random.Random(seed)
    plans = [make_step("train", step, tasks, samples) for step in range(steps)]
    evaluations = [make_step("eval", 0, tasks, 2)] + ([] if unfinished else [make_step("eval", steps, tasks, 2)])
    for plan in (*evaluations, *plans):
        publish_plan(paths, plan)
        skill = 0.15 + 0.7 * plan.step / max(steps, 1)
        todo = [(group, sample) for group in plan.groups for sample in range(group.num_samples)]
        missing = unfinished if plan is plans[-1] else 0
        for group, sample in todo[: len(todo) - missing]:
            publish_rollout(paths, make_rollout(group, sample, skill, chance))
        for group in plan.groups if not missing else ():
            seal_group(paths, group)
    write_metrics(paths, steps, chance)
    paths.config.write_text("experiment: quickstart\nseed: 0\npolicy:\n  learning_rate: 0.0003\n")
    return paths


METRICS = {
    "train/reward": (0.5, 0.05),
    "train/loss": (0.0, 0.02),
    "train/entropy": (0.4, 0.02),
    "train/clip_share": (0.05, 0.01),
    "train/grad_norm": (0.7, 0.1),
    "train/sampling_gap_max": (3e-5, 5e-6),
    "train/no_credit_share": (0.3, 0.05),
    "train/lr": (3e-4, 0.0),
    "train/update_kl": (2e-3, 2e-4),
    "train/truncated_share": (0.0, 0.0),
    "train/claude_code/reward": (0.4, 0.05),
    "train/pi/reward": (0.5, 0.05),
    "train/claude_code/calls": (3.0, 0.2),
    "train/pi/calls": (2.0, 0.2),
    "credit/advantage_std": (0.8, 0.05),
    "tree/row_tokens": (9_000.0, 500.0),
    "tree/path_tokens": (42_000.0, 2_000.0),
    "time/collect_s": (31.0, 3.0),
    "time/build_s": (0.4, 0.1),
    "time/learn_s": (11.0, 1.0),
}
"""What the learner logs, with a likely value and its spread."""


def write_metrics(paths: RunPaths, steps: int, chance: random.Random) -> None:
    folder = paths.metrics / "csv" / "version_0"
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["step", "epoch", *METRICS])
        writer.writeheader()
        for step in range(steps):
            values = {name: chance.gauss(mean, spread) for name, (mean, spread) in METRICS.items()}
            writer.writerow({"step": step, "epoch": 0, **values})
