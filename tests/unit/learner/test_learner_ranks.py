"""Several processes that learn together say the same as one, and none is left or waited for when one is gone."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from clawhpc.credit.settings import CreditSettings
from clawhpc.errors import LaunchError
from clawhpc.learner.attention import TreeLayout
from clawhpc.learner.batch import Draws, TreeBatch
from clawhpc.learner.callbacks import list_checkpoints
from clawhpc.learner.data import share_step
from clawhpc.learner.hosts import LOOPBACK, THIS_HOST, Host
from clawhpc.learner.networks import load_tree_policy
from clawhpc.learner.policy import load_policy, save_policy
from clawhpc.learner.ranks import NOTICE_S, SILENCE, Ranks, _Followers, _leave, group_of_one, lead_ranks
from clawhpc.learner.sharding import RankEnvironment, clip_gradients, shard
from clawhpc.learner.steps import StepBatch
from clawhpc.ledger.reap import read_processes
from clawhpc.paths import RunPaths
from clawhpc.records import RolloutRecord, Verdict
from tests.fakes.learner_campaign import SETTINGS, Campaign, Killed, close, rollouts, rows_of

ROOT = Path(__file__).parents[3]


def lead(
    command: Sequence[str], logs: Path, per_host: int = 2, hosts: Sequence[Host] = (THIS_HOST,)
) -> AbstractContextManager[Ranks]:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return lead_ranks(per_host, command, hosts=hosts, logs=logs, environment=environment, cuda=False)


def rank(script: str) -> list[str]:
    return [sys.executable, "-m", "tests.fakes.rank", script]


def test_one_rank_by_itself_says_things_to_itself() -> None:
    ranks = Ranks()
    assert ranks.first
    assert ranks.scatter(["mine"]) == "mine"
    assert ranks.gather("mine") == ["mine"]
    assert ranks.broadcast("mine") == "mine"
    assert ranks.add(torch.ones(2)).tolist() == [1.0, 1.0]


def test_ranks_are_numbered_host_by_host_for_lightning_too() -> None:
    places = []
    for number in range(6):
        ranks = Ranks(rank=number, size=6, per_host=2)
        places.append((ranks.host_rank, ranks.local_rank))
        lightnings = RankEnvironment(ranks)
        assert (lightnings.node_rank(), lightnings.local_rank()) == places[-1]
        assert (lightnings.global_rank(), lightnings.world_size(), ranks.num_hosts) == (number, 6, 3)
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_ranks_scatter_gather_broadcast_and_add(tmp_path: Path) -> None:
    with lead(rank("exchange"), tmp_path, per_host=3) as ranks:
        assert ranks.scatter([1, 2, 3]) == 1
        assert ranks.gather(10) == [10, 20, 30]
        assert ranks.broadcast("all") == "all"
        sums = ranks.gather(ranks.add(torch.tensor([5.0, 0.0])))
        assert [each.tolist() for each in sums] == [[5.0, 3.0]] * 3
    assert not torch.distributed.is_initialized()


def test_ranks_that_have_met_may_wait_for_one_another_for_days() -> None:
    """A collection takes hours, in which rank 0 says nothing."""
    with group_of_one(cuda=False):
        gloo = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
        assert gloo.options._timeout == SILENCE > timedelta(days=1)


def test_a_rank_that_fails_is_named_with_its_log_and_not_waited_for(tmp_path: Path) -> None:
    how = "rank 1 of the learner has ended with exit code 1: ValueError: a reason; its log"
    with pytest.raises(LaunchError, match=how) as caught, lead(rank("fail"), tmp_path) as ranks:  # noqa: PT012
        began = time.monotonic()
        ranks.gather(0)
    assert str(tmp_path / "rank-1.log") in str(caught.value)
    assert time.monotonic() - began < NOTICE_S


def test_a_rank_that_ends_while_rank_0_is_busy_is_named_though_its_end_has_taken_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With GPUs the end of a rank aborts the group, and rank 0, which was collecting, finds none when it comes back."""
    watch = _Followers.watch
    monkeypatch.setattr(_Followers, "watch", lambda self, *, abort: watch(self, abort=True))
    how = "rank 1 of the learner has ended with exit code 1: ValueError: a reason; its log"
    with pytest.raises(LaunchError, match=how), lead(rank("fail"), tmp_path) as ranks:  # noqa: PT012
        until = time.monotonic() + NOTICE_S
        while torch.distributed.is_initialized() and time.monotonic() < until:
            time.sleep(0.05)
        ranks.scatter([1, 2])


def test_a_group_that_several_threads_would_abort_is_aborted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each rank that has ended, and rank 0 by itself."""
    aborted: list[int] = []

    def abort() -> None:
        time.sleep(0.1)
        aborted.append(1)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: not aborted)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", abort)
    threads = [threading.Thread(target=_leave, kwargs={"abort": True}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert aborted == [1]


def test_a_value_error_of_rank_0_is_its_own_and_waits_for_nobody(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), lead(rank("wait"), tmp_path) as ranks:  # noqa: PT012
        ranks.gather(0)
        began = time.monotonic()
        raise ValueError("mine")
    assert time.monotonic() - began < NOTICE_S


def test_a_rank_that_dies_on_another_host_is_named_though_its_starter_tells_of_it_late(tmp_path: Path) -> None:
    """And not one that fails because it is gone, and is noticed sooner."""
    slow = ("sh", "-c", '"$@"; code=$?; sleep 1; exit $code', "slow")
    hosts = [Host(name=name, address=LOOPBACK, starter=by) for name, by in {"near": ("env",), "far": slow}.items()]
    how = "rank 2 of the learner on far was killed by SIGKILL"
    with pytest.raises(LaunchError, match=how), lead(rank("wait"), tmp_path, 1, (THIS_HOST, *hosts)) as ranks:  # noqa: PT012
        os.kill(ranks.gather(0)[2], signal.SIGKILL)
        ranks.gather(0)


def test_a_rank_that_does_not_come_is_named_with_what_it_said(tmp_path: Path) -> None:
    absent = [sys.executable, "-c", "import sys; sys.exit('no GPU here')"]
    with pytest.raises(LaunchError, match="exit code 1: no GPU here; its log"), lead(absent, tmp_path):
        pytest.fail("nobody has met")


def test_an_error_of_rank_0_ends_the_others_and_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), lead(rank("wait"), tmp_path) as ranks:  # noqa: PT012
        pid = ranks.gather(0)[1]
        raise KeyError("mine")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_rows_are_dealt_out_in_rounds_of_like_size_and_the_last_round_is_filled_up() -> None:
    sizes = [3, 9, 1, 7, 5]
    step = StepBatch(
        step=4,
        rows=tuple(chain_row(size) for size in sizes),
        draws=Draws(sampling_logprobs=torch.zeros(5), token_weight=torch.ones(5), advantages=torch.ones(5)),
        metrics={"train/reward": 1.0},
    )
    first, second = share_step(step, 2)
    assert first is not None
    assert second is not None
    assert [row.num_tokens for row in first.rows] == [9, 5, 1]
    assert [row.num_tokens for row in second.rows] == [7, 3, 1]
    assert len(second.rows[-1].draw_N) == 0
    assert (first.metrics, second.metrics) == (step.metrics, {})
    assert share_step(step, 1) == [step]
    assert share_step(None, 3) == [None] * 3


def chain_row(size: int) -> TreeBatch:
    ids_BT = torch.arange(size)[None]
    return replace(TreeBatch.empty(), input_ids_BT=ids_BT, positions_BT=ids_BT, layout=TreeLayout.chain(size))


def first_step_teaches_nothing(step: int) -> list[RolloutRecord]:
    """In two harnesses."""
    keys = {"a": "pi", "b": "codex"}
    records = [replace(record, key=replace(record.key, harness=keys[record.key.task_id])) for record in rollouts(step)]
    return records if step else [replace(record, verdict=Verdict(reward=1.0)) for record in records]


def logged(run: RunPaths, name: str) -> list[float]:
    return [float(row[name] or 0) for row in rows_of(run)]


def test_two_processes_learn_what_one_does_also_when_they_are_killed_and_go_on(policy: Path, tmp_path: Path) -> None:
    one = Campaign(RunPaths(tmp_path / "one"), collect=first_step_teaches_nothing, by_harness=True)
    whole = one.train(policy)
    two = Campaign(
        RunPaths(tmp_path / "two"),
        collect=first_step_teaches_nothing,
        by_harness=True,
        settings=replace(SETTINGS, devices=2, accelerator="cpu"),
        kill_when=lambda *now: now == ("collect", 1),
    )
    with pytest.raises(Killed):
        two.train(policy)
    two.kill_when = lambda *now: False
    assert close(two.train(policy), whole)
    gaps = [f"train/{name}/sampling_gap{part}" for name in ("pi", "codex") for part in ("", "_max")]
    for name in ("train/loss", "train/grad_norm", *gaps):
        assert logged(two.run, name) == pytest.approx(logged(one.run, name), abs=1e-6)
    for row in rows_of(one.run):
        largest = [float(row[name] or 0) for name in gaps if name.endswith("_max")]
        assert max(largest) == pytest.approx(float(row["train/sampling_gap_max"] or 0))
    both = [pair for pair in zip(logged(one.run, gaps[0]), logged(one.run, gaps[2]), strict=True) if all(pair)]
    assert both
    assert all(left != right for left, right in both)
    assert [at for event, at in two.events if event == "collect"] == [0, 1, 1, 2, 3]
    assert tied_in(one.run) == tied_in(two.run) == 1, "the embedding and the output head, stored once"


def tied_in(run: RunPaths) -> int:
    """Weights of the newest checkpoint that are stored once under two names."""
    weights = torch.load(list_checkpoints(run.checkpoints)[-1], weights_only=False)["state_dict"]
    return len(weights) - len({weight.data_ptr() for weight in weights.values()})


def test_ppo_on_a_model_of_experts_goes_from_two_processes_to_one(policy: Path, tmp_path: Path) -> None:
    experts = expert_policy(policy, tmp_path / "start")
    settings = replace(SETTINGS, token_budget=12, gradient_checkpointing=True, accelerator="cpu")
    credit = CreditSettings(estimator="tree_gae")
    one = Campaign(RunPaths(tmp_path / "one"), settings=settings, credit=credit, num_steps=3)
    whole = one.train(experts)
    two = replace(one, run=RunPaths(tmp_path / "two"), settings=replace(settings, devices=2), num_steps=2, events=[])
    two.train(experts)
    two.settings, two.num_steps = settings, 3
    assert close(two.train(experts), whole)
    for name in ("train/loss", "train/value_loss", "train/grad_norm", "train/critic_grad_norm", "train/entropy"):
        assert logged(two.run, name) == pytest.approx(logged(one.run, name), rel=1e-5, abs=1e-6)
    load_policy(two.run.policy(1))


def expert_policy(policy: Path, folder: Path) -> Path:
    """As `policy`, with experts."""
    small = load_policy(policy).config.to_dict()
    config = Qwen3MoeConfig(
        **{name: small[name] for name in small if name not in ("model_type", "architectures", "layer_types")},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config)
    return Path(save_policy(folder, model, policy, step=0, renderer="qwen3", thinking=False).path)


def test_a_process_that_dies_in_the_middle_of_a_fit_ends_it_with_its_name(policy: Path, tmp_path: Path) -> None:
    """And in bf16, what the two have learned before is what one learns."""

    def collect(step: int) -> list[RolloutRecord]:
        if step == 1:
            os.kill(only_child(), signal.SIGKILL)
        return rollouts(step)

    settings = replace(SETTINGS, devices=2, accelerator="cpu", precision="bf16-mixed", token_budget=12)
    campaign = Campaign(RunPaths(tmp_path / "two"), collect=collect, settings=settings)
    with pytest.raises(LaunchError, match="rank 1 of the learner was killed by SIGKILL"):
        campaign.train(policy)
    weights, start = (load_file(at / "model.safetensors") for at in (campaign.run.policy(1), policy))
    one = Campaign(RunPaths(tmp_path / "one"), settings=replace(settings, devices=1), num_steps=1).train(policy)
    assert {weight.dtype for weight in (*weights.values(), *one.values())} == {torch.float32}
    assert distance(weights, one) < 0.1 * distance(one, start)


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum((left[name] - right[name]).square().sum().item() for name in left))


def test_in_bf16_a_layer_computes_in_bf16_with_its_experts_and_a_value_head_in_fp32(
    policy: Path, tmp_path: Path
) -> None:
    computed_in: dict[nn.Module, set[torch.dtype]] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        computed_in[module] = {tensor.dtype for tensor in (inputs[0], *module.parameters())}

    network = load_tree_policy(expert_policy(policy, tmp_path / "start"), SETTINGS, with_values=True)
    with group_of_one(cuda=False) as ranks:
        shard(network, init_device_mesh("cpu", (1,)), ranks, bf16=True)
        for module in network.modules():
            if isinstance(module, Qwen3MoeExperts | nn.Linear):
                module.register_forward_pre_hook(note)
        output = network(replace(chain_row(5), trained_N=torch.arange(1, 5), predecessor_N=torch.arange(4)))
        assert output.values_N is not None
        (output.logprobs_N.sum() + output.values_N.sum()).backward()
        assert 0 < clip_gradients(network.parameters(), 1.0) < math.inf
    assert output.logprobs_N.dtype == output.values_N.dtype == torch.float32
    assert network.value_head is not None
    assert computed_in.pop(network.value_head.linear) == {torch.float32}
    assert any(isinstance(module, Qwen3MoeExperts) for module in computed_in)
    assert all(dtypes == {torch.bfloat16} for dtypes in computed_in.values())
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}


@pytest.mark.parametrize("with_experts", [False, True])
def test_a_rank_that_is_given_its_part_loads_nothing(policy: Path, tmp_path: Path, with_experts: bool) -> None:
    folder = expert_policy(policy, tmp_path / "start") if with_experts else policy
    whole, empty = (load_tree_policy(folder, SETTINGS, empty=empty) for empty in (False, True))
    assert all(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    shapes = [{name: value.shape for name, value in network.named_parameters()} for network in (whole, empty)]
    assert shapes[0] == shapes[1]


def only_child() -> int:
    """The process of rank 1."""
    of_ours = [pid for pid, process in read_processes().items() if process.parent == os.getpid()]
    (pid,) = [pid for pid in of_ours if b"clawhpc.learner.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid
