"""What computing every token once saves: forward and backward of per-call rows, per-path rows, and the tree.

    python -m benchmarks.tree [--device cpu|cuda] [--scale 0.1] [--repeats 4] [--only fork] [--write]

Per-call rows: each call's prompt and reply, its reply trained. Per-path rows: each root-to-leaf path of the trees, each
drawn token trained on the first path that holds it. Both are causal rows through transformers' own SDPA, sorted by
length and put side by side where padding costs next to nothing. The three compute the same gradient, and it is
compared. All take turns, and a figure is the median over the turns. The ideal is the ratio of FLOPs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.proxy.machine import Neighbours
from benchmarks.tree_page import Cell, Cost, Flops, Results, write_page
from benchmarks.tree_shapes import EVERY_TURN, VOCAB, PlainRow, Shape, call_rows, path_rows, shapes
from clawhpc.learner.attention import use_tree_attention
from clawhpc.learner.batch import StepTree, TreeBatch, build_batches
from clawhpc.learner.losses import chunked_logprobs
from clawhpc.learner.networks import TreePolicy

BUDGET = 131_072
"""Tokens of a micro-batch before they are scaled; the tree's rows have the same."""
PADDING = 0.02
"""Of a micro-batch of plain rows, at most."""
LOGIT_CHUNK = 4096
SMALL = 0.02
"""Scale of a shape that is computed before all others; on a GPU, kernels are compiled then."""
GAP = {"cpu": 1e-4, "cuda": 0.1}
"""Of gradients, at most: fp32, and bf16."""
FORWARD_BACKWARD, ATTENTION, HEAD = 3.0, 3.5, 4.0
"""FLOPs of both passes over those of the forward pass: the backward pass of a matrix product is two; flash attention
computes its scores again, and so does the output head, in chunks.
"""

Update = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run is made with."""

    device: torch.device
    scale: float
    repeats: int

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch."""
        return round(BUDGET * self.scale)


def make_model(device: torch.device) -> Qwen3ForCausalLM:
    """The quickstart's policy on CPU, in fp32; the shape of Qwen3-0.6B on a GPU, in bf16 as the learner computes there."""
    torch.manual_seed(0)
    shared = dict(tie_word_embeddings=True, initializer_range=0.05, vocab_size=VOCAB)
    tiny = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4)
    real = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16)
    if device.type == "cpu":
        return Qwen3ForCausalLM(Qwen3Config(**tiny, **shared, num_key_value_heads=4, head_dim=32))
    shared |= dict(initializer_range=0.02, vocab_size=151_936)
    return Qwen3ForCausalLM(Qwen3Config(**real, **shared, num_key_value_heads=8, head_dim=128)).to(
        device, torch.bfloat16
    )


def tree_update(policy: TreePolicy, rows: Sequence[TreeBatch], weight_M: Tensor) -> Update:
    """Forward and backward over merged rows."""

    def update() -> None:
        for row in rows:
            logprobs_N = policy(row).logprobs_N
            (logprobs_N * weight_M[row.draw_N]).sum().backward()

    return update


def plain_update(model: Qwen3ForCausalLM, micros: Sequence[Sequence[PlainRow]], weight_M: Tensor) -> Update:
    """The same over plain rows; only states that predict a trained token reach the output head."""
    device = weight_M.device

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)

    made = []
    for micro in micros:
        width = max(len(row.token_ids) for row in micro)
        ids_BT = integers([token for row in micro for token in (*row.token_ids, *(0,) * (width - len(row.token_ids)))])
        trained_N = integers([width * at + place for at, row in enumerate(micro) for place in row.trained])
        made.append((ids_BT.view(-1, width), trained_N, integers([draw for row in micro for draw in row.draws])))

    def update() -> None:
        for ids_BT, trained_N, draw_N in made:
            hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
            logprobs_N, _ = chunked_logprobs(
                hidden_BTD.flatten(0, 1)[trained_N - 1],
                ids_BT.flatten()[trained_N],
                model.lm_head,
                temperature=1.0,
                num_token_ids=VOCAB,
                chunk=LOGIT_CHUNK,
            )
            (logprobs_N * weight_M[draw_N]).sum().backward()

    return update


def side_by_side(rows: Sequence[PlainRow], budget: int) -> list[list[PlainRow]]:
    """Micro-batches of rows of about one length, within the budget."""
    micros: list[list[PlainRow]] = []
    for row in sorted((row for row in rows if row.trained), key=lambda row: -len(row.token_ids)):
        if micros:
            width, tokens = len(micros[-1][0].token_ids), sum(len(other.token_ids) for other in micros[-1])
            room = width * (len(micros[-1]) + 1)
            if room <= budget and room - tokens - len(row.token_ids) <= PADDING * room:
                micros[-1].append(row)
                continue
        micros.append([row])
    return micros


def count_flops(model: PreTrainedModel, num_tokens: int, num_pairs: int, num_trained: int) -> Flops:
    """Of both passes."""
    config = model.config
    matrices = sum(weight.numel() for name, weight in model.named_parameters() if weight.dim() > 1 and "layers" in name)
    per_pair = 4 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return Flops(
        linear=FORWARD_BACKWARD * 2 * matrices * num_tokens,
        attention=ATTENTION * per_pair * num_pairs,
        head=HEAD * 2 * config.hidden_size * config.vocab_size * num_trained,
    )


def plain_flops(model: PreTrainedModel, rows: Sequence[PlainRow]) -> Flops:
    """Without what padding costs."""
    lengths = [len(row.token_ids) for row in rows if row.trained]
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return count_flops(model, sum(lengths), pairs, sum(len(row.trained) for row in rows))


def tree_flops(model: PreTrainedModel, rows: Sequence[TreeBatch]) -> Flops:
    """Of the merged rows."""
    pairs = sum(
        (part.stop - part.start) * (part.end - part.stop) + (part.stop - part.start) * (part.stop - part.start + 1) // 2
        for row in rows
        for part in row.layout.segments
    )
    return count_flops(model, sum(row.num_tokens for row in rows), pairs, sum(len(row.trained_N) for row in rows))


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compute a shape."""

    model: PreTrainedModel
    update: Update
    tokens: int
    flops: Flops


def ways(shape: Shape, setting: Setting) -> dict[str, Way]:
    """The tree, and the rows that others make of it; one for each call only where they are not those for each path."""
    trees = shape.step_trees
    count = sum(tree.num_sampled_tokens for tree in shape.trees)
    weight_M = (torch.rand(count, generator=torch.Generator().manual_seed(1)) / count).to(setting.device)
    found = {"tree": tree_way(trees, weight_M, setting), "path": plain_way(path_rows(trees), weight_M, setting)}
    if len(call_rows(trees)) > len(path_rows(trees)):
        found["call"] = plain_way(call_rows(trees), weight_M, setting)
    return found


def tree_way(trees: Sequence[StepTree], weight_M: Tensor, setting: Setting, *, recompute: bool = False) -> Way:
    """Merged rows through our attention; with `recompute`, layers are computed again in the backward pass."""
    model = make_model(setting.device)
    use_tree_attention(model)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = [row.to(setting.device) for row in build_batches(trees, token_budget=setting.budget)]
    policy = TreePolicy(model, num_token_ids=VOCAB, logit_chunk=LOGIT_CHUNK, with_values=False)
    tokens = sum(row.num_tokens for row in rows)
    return Way(model=model, update=tree_update(policy, rows, weight_M), tokens=tokens, flops=tree_flops(model, rows))


def plain_way(rows: Sequence[PlainRow], weight_M: Tensor, setting: Setting) -> Way:
    """Plain rows through transformers' own attention."""
    model = make_model(setting.device)
    update = plain_update(model, side_by_side(rows, setting.budget), weight_M)
    return Way(
        model=model, update=update, tokens=sum(len(row.token_ids) for row in rows), flops=plain_flops(model, rows)
    )


def measure(shape: Shape, setting: Setting) -> Cell:
    """All ways to compute a shape."""
    found = ways(shape, setting)
    costs = measure_ways(list(found.values()), setting)
    by_name = dict(zip(found, costs, strict=True))
    grads = {name: _gradients(way.model) for name, way in found.items()}
    began = time.perf_counter()
    build_batches(shape.step_trees, token_budget=setting.budget)
    return Cell(
        shape=shape.name,
        tree=by_name["tree"],
        path=by_name["path"],
        call=by_name.get("call", by_name["path"]),
        gap=max(_gap(grads["tree"], grads[name]) for name in found if name != "tree"),
        build_s=time.perf_counter() - began,
    )


def measure_ways(found: Sequence[Way], setting: Setting) -> list[Cost]:
    """In turns, the first two as often one before the other as after it, and any other last: a way pays for what the one
    before it has left in caches and given back of memory. Each leaves its gradients behind.
    """
    peaks = []
    for way in found:
        way.model.zero_grad()
        peaks.append(peak_bytes(way.update, setting.device))
    times: list[list[float]] = [[] for _ in found]
    pair, rest = [*zip(found, times, strict=True)][:2], [*zip(found, times, strict=True)][2:]
    for turn in range(setting.repeats):
        for way, own in [*(reversed(pair) if turn % 2 else pair), *rest]:
            way.model.zero_grad()
            own.append(seconds(way.update, setting.device))
    return [
        Cost(tokens=way.tokens, flops=way.flops, times_s=tuple(own), peak_bytes=peak)
        for way, own, peak in zip(found, times, peaks, strict=True)
    ]


def seconds(update: Update, device: torch.device) -> float:
    """Of one update."""
    began = time.perf_counter()
    update()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def peak_bytes(update: Update, device: torch.device) -> int:
    """Most memory that one update holds beyond what there was before: of the process on CPU, of torch on a GPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        update()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    before = _status_bytes("VmRSS")
    update()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def _gradients(model: PreTrainedModel) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _gap(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Largest difference of a gradient, relative to the largest gradient of its parameter."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(left, right, strict=True))


def recomputation(setting: Setting) -> list[Cost]:
    """Of the tree of a harness that forks at every turn: layers kept, and layers computed again."""
    shape = next(shape for shape in shapes(setting.scale) if shape.name == EVERY_TURN)
    count = sum(tree.num_sampled_tokens for tree in shape.trees)
    weight_M = torch.ones(count, device=setting.device) / count
    found = [tree_way(shape.step_trees, weight_M, setting, recompute=recompute) for recompute in (False, True)]
    return measure_ways(found, setting)


def run(setting: Setting, only: str) -> Results:
    """All shapes whose name holds `only`."""
    neighbours, load = Neighbours([]), os.getloadavg()[0]
    measure(next(shapes(SMALL)), setting)  # what is made on first use
    cells = []
    for shape in (shape for shape in shapes(setting.scale) if only in shape.name):
        cells.append(measure(shape, setting))
        assert cells[-1].gap < GAP[setting.device.type], "all ways compute one gradient"
        print(cells[-1].line(), flush=True)
    kept, recomputed = recomputation(setting)
    on_gpu = setting.device.type == "cuda"
    return Results(
        machine=neighbours.machine(),
        load=load,
        device=torch.cuda.get_device_name() if on_gpu else "CPU",
        model="The shape of Qwen3-0.6B in bf16." if on_gpu else "The tiny policy of the quickstart in fp32.",
        threads=torch.get_num_threads(),
        scale=setting.scale,
        repeats=setting.repeats,
        cells=tuple(cells),
        kept=kept,
        recomputed=recomputed,
    )


def main() -> None:
    """Measure, print, and write where that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--scale", type=float, default=0.1, help="of all lengths")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="shapes whose name holds this")
    parser.add_argument("--write", action="store_true", help="docs/results/tree.md and its plot")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    setting = Setting(device=torch.device(arguments.device), scale=arguments.scale, repeats=arguments.repeats)
    results = run(setting, arguments.only)
    machine = results.machine
    print(
        f"{machine.cores} cores, {results.threads} threads, load {results.load:.2f}, others used {machine.others:.0%}; "
        f"layers computed again: {results.recomputed.peak_bytes / 2**20:.0f} MiB in place of "
        f"{results.kept.peak_bytes / 2**20:.0f}, {results.recomputed.time_s:.2f} s in place of {results.kept.time_s:.2f}"
    )
    if arguments.write:
        write_page(results, Path("docs/results/tree.md"))


if __name__ == "__main__":
    main()
