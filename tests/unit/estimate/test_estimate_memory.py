"""What memory is said to be taken is what a small learner takes: its weights, its optimizer, what autograd keeps."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from clawhpc.credit.settings import CreditSettings
from clawhpc.estimate.decoder import KNOWN, Decoder, count_numbers, read_decoder
from clawhpc.estimate.memory import (
    FP32,
    GIB,
    LearnerMemory,
    count_networks,
    engine_memory,
    gathered,
    host_memory,
    layer_activations,
    learner_memory,
)
from clawhpc.estimate.settings import PlanSettings
from clawhpc.learner.attention import TreeLayout, use_tree_attention
from clawhpc.learner.batch import TreeBatch
from clawhpc.learner.networks import TreePolicy
from clawhpc.learner.policy import create_policy
from clawhpc.learner.ranks import ALONE
from clawhpc.learner.rl_module import RlModule
from clawhpc.learner.settings import CriticSettings, LearnerSettings, LossSettings
from clawhpc.learner.sharding import shard
from clawhpc.learner.tokenizer import train_tokenizer
from clawhpc.paths import RunPaths
from clawhpc.serve.settings import EngineSettings
from tests.fakes.learner_campaign import SMALL, Campaign

PPO = CreditSettings(estimator="path_gae")
GRPO = CreditSettings()
ARMS = {
    "grpo": (GRPO, LearnerSettings()),
    "a reference": (GRPO, LearnerSettings(loss=LossSettings(kl_coef=0.1))),
    "ppo": (PPO, LearnerSettings()),
    "ppo with one backbone": (PPO, LearnerSettings(critic=CriticSettings(backbone="policy"))),
}
SHAPE = Decoder(
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    vocab_size=64,
    tied=True,
    num_positions=512,
)
MIXTURE = dataclasses.replace(SHAPE, num_experts=8, num_chosen=2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    train_tokenizer(["write kiwi to apple.txt"] * 3, folder / "tokenizer", vocab_size=280)
    return Path(create_policy(folder / "policy", folder / "tokenizer", SMALL, seed=0).path)


def num_bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("arm", ARMS)
def test_a_learner_holds_as_many_bytes_of_weights_gradients_and_optimizer_as_is_said(arm: str, policy: Path) -> None:
    credit, settings = ARMS[arm]
    module = RlModule(settings, policy, 1, with_critic=credit.needs_critic)
    module.configure_model()
    optimizer = module.configure_optimizers()
    learned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in learned:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [value for slots in optimizer.state.values() for value in slots.values() if value.dim()]
    memory = learner_memory(read_decoder(policy / "config.json"), settings, credit)
    assert memory.weights == num_bytes(learned)
    assert memory.gradients == num_bytes(parameter.grad for parameter in learned)
    assert memory.moments == num_bytes(moments)
    assert memory.reference == sum(num_bytes(network.parameters()) for network in module.reference)


def test_the_most_at_a_time_is_while_a_row_passes_or_while_the_optimizer_moves() -> None:
    parts = {"weights": 1, "gradients": 1, "moments": 2, "reference": 1}
    memory = LearnerMemory(**parts, gathered=2, activations=3, logits=4, optimizer=5)
    assert memory.peak == 5 + 2 + 4
    assert dataclasses.replace(memory, activations=9).peak == 5 + 2 + 9
    assert dataclasses.replace(memory, optimizer=7).peak == 5 + 7


def model_of(decoder: Decoder, num_layers: int, dtype: torch.dtype) -> PreTrainedModel:
    shape: dict[str, Any] = dict(
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.ffn_size,
        num_hidden_layers=num_layers,
        num_attention_heads=decoder.num_heads,
        num_key_value_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
    )
    experts: dict[str, Any] = dict(num_experts=decoder.num_experts, num_experts_per_tok=decoder.num_chosen)
    config = (
        Qwen3MoeConfig(**shape, **experts, moe_intermediate_size=decoder.ffn_size)
        if decoder.num_experts
        else Qwen3Config(**shape)
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    use_tree_attention(model)
    return model.train()


def bytes_kept(model: nn.Module, num_tokens: int) -> int:
    """What autograd keeps of a row until its backward pass, the weights themselves not counted."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids_BT, positions_BT = torch.arange(num_tokens)[None] % SHAPE.vocab_size, torch.arange(num_tokens)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids_BT, position_ids=positions_BT, use_cache=False, tree_layout=TreeLayout.chain(num_tokens))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "decoder",
    [
        SHAPE,
        dataclasses.replace(SHAPE, hidden_size=128),
        dataclasses.replace(SHAPE, ffn_size=384),
        dataclasses.replace(SHAPE, num_heads=8),
        MIXTURE,
        dataclasses.replace(MIXTURE, num_chosen=4),
    ],
    ids=["dense", "wide", "thick", "many heads", "experts", "more of them"],
)
def test_autograd_keeps_as_much_of_a_layer_as_is_said(decoder: Decoder, dtype: torch.dtype) -> None:
    num_tokens = 128
    one, three = (bytes_kept(model_of(decoder, layers, dtype).base_model, num_tokens) for layers in (1, 3))
    said = layer_activations(decoder, dtype.itemsize)
    assert (three - one) / 2 / num_tokens == pytest.approx(said, rel=0.06)


class Allocations(TorchDispatchMode):
    """Bytes of all tensors that were made within it and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def row_of(num_tokens: int, num_trained: int) -> TreeBatch:
    """One conversation, of which the end trains."""
    trained_N = torch.arange(num_tokens - num_trained, num_tokens)
    return TreeBatch(
        input_ids_BT=torch.arange(num_tokens)[None] % SHAPE.vocab_size,
        positions_BT=torch.arange(num_tokens)[None],
        trained_N=trained_N,
        predecessor_N=trained_N - 1,
        draw_N=torch.arange(num_trained),
        layout=TreeLayout.chain(num_tokens),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("num_trained", [8, 512], ids=["by its row", "by its logits"])
def test_a_pass_over_a_row_takes_as_much_at_its_peak_as_is_said(
    num_trained: int, again: bool, dtype: torch.dtype
) -> None:
    decoder = dataclasses.replace(SHAPE, vocab_size=64 if num_trained == 8 else 8192)
    model = model_of(decoder, decoder.num_layers, dtype)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    chunk = num_trained
    policy = TreePolicy(model, num_token_ids=decoder.vocab_size, logit_chunk=chunk, with_values=False)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    row = row_of(1024, num_trained)
    with Allocations() as allocations:
        policy(row).logprobs_N.sum().backward()
    settings = LearnerSettings(
        token_budget=1024,
        logit_chunk=chunk,
        gradient_checkpointing=again,
        precision="32-true" if dtype == torch.float32 else "bf16-mixed",
    )
    said = learner_memory(decoder, settings, GRPO)
    assert (said.logits > said.activations) == (num_trained == 512)
    assert 0.88 < allocations.peak / max(said.activations, said.logits) < 1.05


def test_with_checkpointing_a_row_keeps_the_input_of_each_layer_and_what_one_needs() -> None:
    kept = learner_memory(SHAPE, LearnerSettings(token_budget=100), GRPO)
    again = learner_memory(SHAPE, LearnerSettings(token_budget=100, gradient_checkpointing=True), GRPO)
    layer = 100 * layer_activations(SHAPE, FP32)
    assert kept.activations == 4.5 * layer
    assert again.activations == 4 * 100 * SHAPE.hidden_size * FP32 + 1.5 * layer


def test_ranks_share_what_is_held_and_each_gathers_whole_layers() -> None:
    alone = learner_memory(SHAPE, LearnerSettings(), PPO)
    shared = learner_memory(SHAPE, LearnerSettings(devices=4, num_nodes=2), PPO)
    head = 16 * SHAPE.hidden_size  # of values: a single row, which one rank has
    assert shared.held == (alone.held - head) / 8 + head
    assert (alone.gathered, shared.gathered) == (FP32 * SHAPE.embedding_params, gathered(SHAPE, FP32, 8))
    assert learner_memory(SHAPE, LearnerSettings(precision="bf16-mixed"), PPO).gathered == gathered(SHAPE, 2, 1)


@contextmanager
def ranks_of_nobody(number: int) -> Iterator[DeviceMesh]:
    """This process is the first of them, and hears nothing of the others."""
    torch.distributed.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (number,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("number", [3, 8, 48])
@pytest.mark.parametrize("decoder", [SHAPE, MIXTURE], ids=["dense", "experts"])
def test_ranks_that_do_not_divide_the_rows_of_a_weight_hold_and_gather_what_fills_them_up(
    decoder: Decoder, number: int
) -> None:
    decoder = dataclasses.replace(decoder, tied=False)
    model = model_of(decoder, decoder.num_layers, torch.float32)
    policy = TreePolicy(model, num_token_ids=decoder.vocab_size, logit_chunk=8, with_values=True)
    with ranks_of_nobody(number) as mesh:
        shard(policy, mesh, ALONE, bf16=False)
        held = sum(parameter.to_local().untyped_storage().nbytes() for parameter in policy.parameters())  # type: ignore[attr-defined]
        with Allocations() as allocations:
            model.base_model.layers[0].unshard()
    learner = LearnerSettings(devices=number, critic=CriticSettings(backbone="policy"))
    said = learner_memory(decoder, learner, PPO)
    assert said.weights == held
    filled_up = count_numbers(decoder.layer_weights, number)
    assert allocations.now == FP32 * filled_up
    outside = decoder.num_params - decoder.num_layers * decoder.layer_params
    whole = 2 * decoder.layer_params + outside
    filled_up = 2 * filled_up + count_numbers(decoder.outer_weights, number)
    assert said.gathered == FP32 * whole + 2 * FP32 * filled_up, "only gradients of a pass are not"


def test_experts_are_shared_whole() -> None:
    """128 of them, in all but a twentieth of the policy."""
    decoder = KNOWN["Qwen3-30B-A3B"]
    even = learner_memory(decoder, LearnerSettings(), GRPO).held
    more = {
        ranks: learner_memory(decoder, LearnerSettings(devices=ranks), GRPO).held * ranks / even
        for ranks in (32, 40, 48, 64, 96)
    }
    assert more == pytest.approx({32: 1.0, 40: 1.24, 48: 1.12, 64: 1.0, 96: 1.48}, abs=0.01)


def test_16_bytes_a_parameter_are_held_and_4_more_for_a_reference() -> None:
    decoder = KNOWN["Qwen3-4B"]
    assert learner_memory(decoder, LearnerSettings(), GRPO).held == 16 * 4_022_468_096
    with_reference = LearnerSettings(loss=LossSettings(kl_coef=0.1))
    assert learner_memory(decoder, with_reference, GRPO).held == 20 * 4_022_468_096


def test_a_critic_has_no_output_head() -> None:
    decoder = KNOWN["Qwen3-8B"]
    networks = count_networks(decoder, LearnerSettings(), PPO)
    assert networks.critic == decoder.num_params - decoder.embedding_params + decoder.hidden_size


def test_a_checkpoint_holds_and_a_policy_takes_as_many_bytes_as_is_said(policy: Path, tmp_path: Path) -> None:
    run = Campaign(RunPaths(tmp_path), num_steps=1)
    run.train(policy)
    decoder = read_decoder(policy / "config.json")
    (path,) = run.run.checkpoints.glob("*.ckpt")
    checkpoint = torch.load(path, weights_only=False)
    moments = [value for slots in checkpoint["optimizer_states"][0]["state"].values() for value in slots.values()]
    policy_weights = {name: value for name, value in checkpoint["state_dict"].items() if name.startswith("policy.")}
    del policy_weights["policy.model.lm_head.weight"]  # tied: named twice, stored once
    held = num_bytes(policy_weights.values()) + num_bytes(value for value in moments if value.dim())
    sharded = dataclasses.replace(run.settings, precision="bf16-mixed")
    assert held == host_memory(decoder, sharded, GRPO).checkpoint
    weights = (run.run.policy(1) / "model.safetensors").stat().st_size
    assert weights == pytest.approx(FP32 * decoder.num_params, rel=0.1)


def test_an_engine_has_what_its_weights_leave_for_keys_and_values() -> None:
    decoder = KNOWN["Qwen3-4B"]
    settings = EngineSettings(dtype="bfloat16", gpu_memory_utilization=0.5)
    memory = engine_memory(decoder, settings, PlanSettings(gpu_memory_gib=80, engine_gib=4), on_gpu=True)
    assert memory.token_bytes == 2 * 36 * 8 * 128 * 2  # 144 KiB, as its makers' shape has it
    assert memory.weights == 2 * decoder.num_params
    assert memory.cache == 40 * GIB - memory.weights - 4 * GIB


def test_tensor_parallel_divides_weights_and_heads_but_no_head() -> None:
    decoder = KNOWN["Qwen3-30B-A3B"]  # four heads of keys
    plan = PlanSettings()
    of = {
        size: engine_memory(decoder, EngineSettings(dtype="bfloat16", tensor_parallel_size=size), plan, on_gpu=True)
        for size in (1, 2, 4, 8)
    }
    assert of[2].weights == of[1].weights / 2
    assert of[4].token_bytes == of[1].token_bytes / 4
    assert of[8].token_bytes == of[4].token_bytes


def test_on_a_cpu_the_cache_is_what_is_asked_for() -> None:
    memory = engine_memory(SHAPE, EngineSettings(kv_cache_gib=0.5), PlanSettings(), on_gpu=False)
    assert memory.cache == pytest.approx(0.5 * GIB)
