"""Tree against per-path computation of one GRPO update, on the shape of a quickstart step.

    python benchmarks/bench_learner.py [--threads 2] [--repeats 5]

The policy is the tiny one. A step has 8 tasks x 8 samples of two calls each; all prompts share a head, those of a task
a tail, and a second prompt extends the first call. `chain` is one long conversation; `forks` one that forks at every
turn, as a harness does that rewrites its last message. Each figure is the median over the repeats of forward and
backward of the loss; per-path rows are sorted by length and padded, in micro-batches of the same token budget.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawhpc.learner.attention import use_tree_attention
from clawhpc.learner.batch import CreditedTree, build_batches
from clawhpc.learner.losses import chunked_logprobs
from clawhpc.learner.module import row_logprobs
from clawhpc.learner.settings import LearnerSettings
from clawhpc.records import VersionSpan
from clawhpc.tree.nodes import CallTree, Node

VOCAB = 1152
BUDGET = 16_384
SETTINGS = LearnerSettings(token_budget=BUDGET)


@dataclass
class Turn:
    """Context and the draw that answers it; the next turn extends the draw, or only the context."""

    context: int
    draw: int
    extends_draw: bool = True


def grow(head: Sequence[int], turns: Sequence[Turn], name: str, rng: torch.Generator) -> CallTree:
    """The tree of one conversation."""
    nodes: list[Node] = []

    def add(parent_id: int | None, token_ids: tuple[int, ...], sampled: bool) -> int:
        parent_end = nodes[parent_id].end if parent_id is not None else 0
        spans = (VersionSpan(version=0, start=0, end=len(token_ids)),) if sampled else ()
        logprobs = (-2.0,) * len(token_ids) if sampled else ()
        node_id = len(nodes)
        nodes.append(
            Node(
                node_id=node_id,
                parent_id=parent_id,
                start=parent_end,
                token_ids=token_ids,
                sampled=sampled,
                sampling_logprobs=logprobs,
                weight_versions=spans,
                call_id=node_id if sampled else None,
            )
        )
        return node_id

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB, (length,), generator=rng).tolist())

    place = add(None, tuple(head), False)
    for turn in turns:
        prompt = add(place, tokens(turn.context), False)
        drawn = add(prompt, tokens(turn.draw), True)
        place = drawn if turn.extends_draw else prompt
    return CallTree(rollout_id=name, nodes=tuple(nodes), leaf_of_call={})


def shapes() -> dict[str, list[CallTree]]:
    """The steps that are measured."""
    rng = torch.Generator().manual_seed(0)
    head = torch.randint(VOCAB, (770,), generator=rng).tolist()
    tails = [torch.randint(VOCAB, (30,), generator=rng).tolist() for _ in range(8)]
    two_calls = [Turn(context=2, draw=50), Turn(context=28, draw=40)]
    twenty = [Turn(context=100, draw=60) for _ in range(20)]
    forking = [Turn(context=160, draw=60, extends_draw=False) for _ in range(20)]
    return {
        "step": [grow(head + tails[i // 8], two_calls, f"step-{i}", rng) for i in range(64)],
        "chain": [grow(head, twenty, "chain", rng)],
        "forks": [grow(head, forking, "forks", rng)],
    }


def tree_update(model: Qwen3ForCausalLM, trees: list[CreditedTree]) -> None:
    """Forward and backward of a policy gradient over merged rows."""
    for row in build_batches(trees, token_budget=BUDGET):
        logprobs_N, _ = row_logprobs(model, row, SETTINGS, VOCAB)
        (logprobs_N * row.token_weight_BT[row.sampled_BT]).sum().backward()


def path_update(model: Qwen3ForCausalLM, trees: list[CreditedTree]) -> None:
    """The same over padded rows of whole paths, every copy of a token with its share of the weight."""
    paths = sorted(((tree, leaf) for tree in trees for leaf in tree.tree.leaves), key=lambda path: _length(*path))
    per_batch = max(1, BUDGET // _length(*paths[-1]))
    copies = {id(tree): _num_copies(tree.tree) for tree in trees}
    for start in range(0, len(paths), per_batch):
        micro = paths[start : start + per_batch]
        width = _length(*micro[-1])
        ids_BT = torch.zeros(len(micro), width, dtype=torch.long)
        weight_BT = torch.zeros(len(micro), width)
        for row, (tree, leaf) in enumerate(micro):
            ids_BT[row, : _length(tree, leaf)] = torch.tensor(tree.tree.path_token_ids(leaf))
            for node in (tree.tree.nodes[step] for step in tree.tree.path(leaf)):
                if node.sampled:
                    weight_BT[row, node.start : node.end] = tree.token_weight / copies[id(tree)][node.node_id]
        _padded_loss(model, ids_BT, weight_BT).backward()


def _padded_loss(model: Qwen3ForCausalLM, ids_BT: Tensor, weight_BT: Tensor) -> Tensor:
    trained = weight_BT[:, 1:] > 0
    hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
    logprobs_N, _ = chunked_logprobs(
        hidden_BTD[trained], ids_BT[:, 1:][trained], model.lm_head, temperature=1.0, num_token_ids=VOCAB, chunk=4096
    )
    return (logprobs_N * weight_BT[:, 1:][trained]).sum()


def _length(tree: CreditedTree, leaf: int) -> int:
    return tree.tree.nodes[leaf].end


def _num_copies(tree: CallTree) -> dict[int, int]:
    counts: dict[int, int] = {}
    for leaf in tree.leaves:
        for step in tree.path(leaf):
            counts[step] = counts.get(step, 0) + 1
    return counts


def make_model() -> Qwen3ForCausalLM:
    """The quickstart's tiny policy."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        initializer_range=0.05,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    return Qwen3ForCausalLM(config)


def median_s(update: Callable[[], None], model: Qwen3ForCausalLM, repeats: int) -> float:
    """Seconds of one update after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        model.zero_grad()
        began = time.perf_counter()
        update()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    on_trees, on_paths = make_model(), make_model()
    use_tree_attention(on_trees)
    print(f"threads {arguments.threads}, median of {arguments.repeats}; fp32, forward + backward")
    print("shape    path tokens  row tokens   ratio   paths s   tree s  speed-up       gap")
    for name, trees in shapes().items():
        weight = 1 / sum(tree.num_sampled_tokens for tree in trees)
        credited = [CreditedTree(tree=t, rollout=i, advantage=1.0, token_weight=weight) for i, t in enumerate(trees)]
        path_tokens = sum(tree.nodes[leaf].end for tree in trees for leaf in tree.leaves)
        row_tokens = sum(row.num_tokens for row in build_batches(credited, token_budget=BUDGET))
        paths_s = median_s(lambda: path_update(on_paths, credited), on_paths, arguments.repeats)  # noqa: B023
        tree_s = median_s(lambda: tree_update(on_trees, credited), on_trees, arguments.repeats)  # noqa: B023
        print(
            f"{name:8}{path_tokens:12}{row_tokens:12}{path_tokens / row_tokens:8.2f}{paths_s:10.3f}{tree_s:9.3f}"
            f"{paths_s / tree_s:10.2f}{_gradient_gap(on_trees, on_paths):10.1e}"
        )


def _gradient_gap(left: Qwen3ForCausalLM, right: Qwen3ForCausalLM) -> float:
    """Largest difference of a gradient, relative to the largest gradient of its parameter."""
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(((a.grad - b.grad).abs().max() / b.grad.abs().max()).item() for a, b in pairs if b.grad is not None)


if __name__ == "__main__":
    main()
