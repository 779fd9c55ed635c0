import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from clawhpc.engine.tokenizer import count_token_ids
from clawhpc.errors import EngineError, UserError
from clawhpc.learner.attention import use_tree_attention
from clawhpc.learner.networks import load_tree_policy
from clawhpc.learner.policy import VOCAB_MULTIPLE, create_policy, describe_model, load_policy, save_policy, sweep_parts
from clawhpc.learner.settings import LearnerSettings, PolicySettings
from clawhpc.learner.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS, train_tokenizer
from clawhpc.records import PolicyVersion, Probe
from clawhpc.serve.checks import check_probe
from clawhpc.store import read_policy, weights_digest
from tests.fakes.disk import largest_file
from tests.fakes.learner_trees import tiny_model

SMALL = PolicySettings(num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=32)
TEXTS = ["<|im_start|>user\nwrite kiwi to apple.txt<|im_end|>\n", "count the lines of plum.txt\n"] * 3


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, folder, vocab_size=300)
    return folder


def test_every_text_round_trips(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)

    @given(text=st.text(max_size=60))
    @settings(max_examples=100, deadline=None)
    def round_trip(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    round_trip()


def test_each_chat_token_is_one_id_and_only_control_tokens_are_special(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    for token in CONTROL_TOKENS + MARKUP_TOKENS:
        assert len(tokenizer.encode(token)) == 1
    assert tokenizer.decode(tokenizer.encode("<tool_call>x<|im_end|>"), skip_special_tokens=True) == "<tool_call>x"
    assert tokenizer.eos_token == "<|im_end|>"


def test_chat_tokens_in_the_texts_teach_no_merges(tokenizer_folder: Path) -> None:
    vocabulary = AutoTokenizer.from_pretrained(tokenizer_folder).get_vocab().keys() - CONTROL_TOKENS
    assert "write" in vocabulary
    assert not [token for token in vocabulary if "im" in token]


def test_the_qwen_renderer_renders_and_parses_with_it(tokenizer_folder: Path) -> None:
    from renderers import Qwen3RendererConfig, create_renderer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    prompt = renderer.render_ids([{"role": "user", "content": "write kiwi"}], add_generation_prompt=True)
    assert tokenizer.decode(prompt) == "<|im_start|>user\nwrite kiwi<|im_end|>\n<|im_start|>assistant\n"


def test_a_policy_folder_loads_in_transformers_with_equal_logits(tokenizer_folder: Path, tmp_path: Path) -> None:
    version = create_policy(tmp_path / "policy", tokenizer_folder, SMALL, seed=3)
    plain = AutoModelForCausalLM.from_pretrained(version.path, attn_implementation="eager")
    ids = torch.tensor([version.probe.token_ids])
    with torch.no_grad():
        expected = plain(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert torch.allclose(torch.tensor(version.probe.logprobs), expected, atol=1e-5)
    assert plain.config.vocab_size % VOCAB_MULTIPLE == 0
    assert count_token_ids(Path(version.path)) <= plain.config.vocab_size
    assert "clawhpc" not in (tmp_path / "policy" / "config.json").read_text()


def test_loading_and_saving_a_policy_changes_no_bit(tokenizer_folder: Path, tmp_path: Path) -> None:
    first = create_policy(tmp_path / "first", tokenizer_folder, SMALL, seed=3)
    model = load_policy(Path(first.path))
    second = save_policy(tmp_path / "second", model, tmp_path / "first", step=7, renderer="qwen3", thinking=False)
    assert second.digest == first.digest == weights_digest(tmp_path / "second")
    assert second.probe == first.probe
    assert read_policy(tmp_path / "second") == second
    assert second.step == 7


def test_a_policy_loads_on_the_cpu_where_lightning_has_torch_make_things_elsewhere(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    create_policy(tmp_path / "policy", tokenizer_folder, SMALL, seed=3)
    with torch.device("meta"):
        network = load_tree_policy(tmp_path / "policy", LearnerSettings(), with_values=True)
    assert {tensor.device.type for tensor in (*network.model.parameters(), *network.model.buffers())} == {"cpu"}


HUB_NAMES = {
    "qwen3": {
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
    },
    "llama": {
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
    },
    "qwen3_moe": {
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.experts.{index}.{name}_proj.weight" for index in range(4) for name in ("gate", "up", "down")),
        "mlp.gate.weight",
    },
}
"""Of a layer, beside its two norms, as Qwen/Qwen3-0.6B, meta-llama/Llama-3.1-8B and Qwen/Qwen3-30B-A3B have them."""
KINDS = sorted(HUB_NAMES)


def model_of(kind: str, tokenizer_folder: Path) -> PreTrainedModel:
    """Two layers, with a row of the head for every id of the tokenizer."""
    model = tiny_model(kind)
    model.resize_token_embeddings(VOCAB_MULTIPLE * -(-count_token_ids(tokenizer_folder) // VOCAB_MULTIPLE))
    use_tree_attention(model)
    return model


def saved(model: PreTrainedModel, folder: Path, tokenizer_folder: Path, **given: Any) -> PolicyVersion:
    return save_policy(folder, model, tokenizer_folder, step=1, renderer="qwen3", thinking=False, **given)


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_names_that_they_have_on_the_hub(kind: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    saved(model_of(kind, tokenizer_folder), tmp_path / "policy", tokenizer_folder)
    layers = {
        f"model.layers.{layer}.{name}"
        for layer in range(2)
        for name in HUB_NAMES[kind] | {"input_layernorm.weight", "post_attention_layernorm.weight"}
    }
    head = set() if kind == "qwen3" else {"lm_head.weight"}  # tied
    found = load_file(tmp_path / "policy" / "model.safetensors").keys()
    assert found == layers | head | {"model.embed_tokens.weight", "model.norm.weight"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_comes_back_bit_for_bit(kind: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    model = model_of(kind, tokenizer_folder)
    version = saved(model, tmp_path / "policy", tokenizer_folder)
    back = load_policy(tmp_path / "policy")
    assert same_bits(back.state_dict(), model.state_dict())
    assert saved(back, tmp_path / "again", tokenizer_folder).digest == version.digest


@pytest.mark.parametrize("kind", KINDS)
def test_weights_given_apart_are_published_as_those_of_the_model_would_be(
    kind: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """As one rank does it, which has gathered them: tied ones come twice, and the model's own are a shard."""
    model = model_of(kind, tokenizer_folder)
    whole = saved(model, tmp_path / "whole", tokenizer_folder)
    gathered = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    assert saved(model, tmp_path / "gathered", tokenizer_folder, state_dict=gathered) == replace(
        whole, path=str(tmp_path / "gathered")
    )
    assert same_bits(load_policy(tmp_path / "gathered").state_dict(), gathered)


def test_a_tied_head_need_not_be_given_apart(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = model_of("qwen3", tokenizer_folder)
    once = dict(model.named_parameters())
    assert "lm_head.weight" not in once
    gathered = saved(model, tmp_path / "gathered", tokenizer_folder, state_dict=once)
    assert gathered.digest == saved(model, tmp_path / "whole", tokenizer_folder).digest


def test_weights_given_apart_must_be_all_of_them(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = model_of("llama", tokenizer_folder)
    gathered = {name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(AssertionError, match=r"missing_keys: \['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
        saved(model, tmp_path / "policy", tokenizer_folder, state_dict=gathered)
    assert list(tmp_path.iterdir()) == []


def test_experts_that_were_loaded_fused_are_published_under_their_names(tokenizer_folder: Path, tmp_path: Path) -> None:
    """transformers would give back the fused names, which vLLM does not know."""
    model = model_of("qwen3_moe", tokenizer_folder)
    version = saved(model, tmp_path / "policy", tokenizer_folder)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "fused" / "model.safetensors")
    again = saved(load_policy(tmp_path / "fused"), tmp_path / "again", tokenizer_folder)
    assert again.digest == version.digest


def test_weights_depend_on_the_seed_alone(tokenizer_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = create_policy(tmp_path / "one", tokenizer_folder, SMALL, seed=3)
    torch.manual_seed(2)
    assert create_policy(tmp_path / "two", tokenizer_folder, SMALL, seed=3).digest == one.digest
    assert create_policy(tmp_path / "three", tokenizer_folder, SMALL, seed=4).digest != one.digest


def test_an_untied_head_is_saved_too(tokenizer_folder: Path, tmp_path: Path) -> None:
    tied, untied = (
        create_policy(tmp_path / str(tie), tokenizer_folder, replace(SMALL, tie_embeddings=tie), seed=0)
        for tie in (True, False)
    )
    assert "lm_head.weight" not in load_file(Path(tied.path) / "model.safetensors")
    assert "lm_head.weight" in load_file(Path(untied.path) / "model.safetensors")


def test_a_policy_that_is_there_stays_and_nothing_half_written_is_left(tokenizer_folder: Path, tmp_path: Path) -> None:
    first = create_policy(tmp_path / "policy", tokenizer_folder, SMALL, seed=0)
    again = create_policy(tmp_path / "policy", tokenizer_folder, SMALL, seed=1)
    assert again.digest == first.digest
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_policy_that_was_cut_short_is_made_again(tokenizer_folder: Path, tmp_path: Path) -> None:
    whole = create_policy(tmp_path / "policy", tokenizer_folder, SMALL, seed=0)
    weights = Path(whole.path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    again = create_policy(tmp_path / "policy", tokenizer_folder, SMALL, seed=0)
    assert again.digest == whole.digest == weights_digest(Path(whole.path))


@pytest.mark.parametrize("num_bytes", [500, 30_000])
def test_a_full_disk_is_told_with_the_path_and_nothing_is_left(
    tokenizer_folder: Path, tmp_path: Path, num_bytes: int
) -> None:
    big = replace(SMALL, hidden_size=64, ffn_size=128)
    with largest_file(num_bytes), pytest.raises(OSError, match=r"File too large: '.*policy") as caught:
        create_policy(tmp_path / "policy", tokenizer_folder, big, seed=0)
    assert caught.value.errno == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_what_killed_saves_have_left_is_removed_and_policies_stay(tokenizer_folder: Path, tmp_path: Path) -> None:
    create_policy(tmp_path / "step-000001", tokenizer_folder, SMALL, seed=0)
    (tmp_path / ".step-000002.0123abcd.part").mkdir()
    (tmp_path / ".step-000002.0123abcd.part" / "model.safetensors").write_bytes(b"half")
    sweep_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_failed_save_leaves_nothing(tmp_path: Path, tokenizer_folder: Path) -> None:
    model = load_policy(Path(create_policy(tmp_path / "policy", tokenizer_folder, SMALL, seed=0).path))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        save_policy(tmp_path / "next", model, empty, step=1, renderer="qwen3", thinking=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "policy"]


def in_bfloat16(policy: PolicyVersion, probe: Probe) -> list[float]:
    """Log-probs that an engine in bfloat16 gives for a probe."""
    plain = AutoModelForCausalLM.from_pretrained(policy.path, dtype=torch.bfloat16, attn_implementation="eager")
    ids_BT = torch.tensor([probe.token_ids])
    with torch.no_grad():
        logprobs_TV = plain(ids_BT).logits[0, :-1].float().log_softmax(-1)
    return logprobs_TV.gather(-1, ids_BT[0, 1:, None])[:, 0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_probe_allows_what_bfloat16_does_to_its_policy_and_not_other_weights(
    kind: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """As one of 48 layers and 128 experts, whose log-probs rounding moves by 0.2 on average."""
    policies = []
    for seed in range(2):
        model = model_of(kind, tokenizer_folder)
        torch.manual_seed(seed)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
        torch.nn.init.constant_(model.base_model.norm.weight, 100.0)
        policies.append(saved(model, tmp_path / str(seed), tokenizer_folder))
    own, other = policies
    assert own.probe.bfloat16_tolerance > 0.2
    check_probe(0, own.probe, in_bfloat16(own, own.probe), "bfloat16")
    with pytest.raises(EngineError, match=r"over 0\.2"):
        check_probe(0, replace(own.probe, bfloat16_tolerance=0.2), in_bfloat16(own, own.probe), "bfloat16")
    with pytest.raises(EngineError, match="does not hold the weights"):
        check_probe(0, own.probe, in_bfloat16(other, own.probe), "bfloat16")


def test_a_policy_that_bfloat16_suits_has_the_least_tolerance(tokenizer_folder: Path, tmp_path: Path) -> None:
    own = saved(model_of("llama", tokenizer_folder), tmp_path / "own", tokenizer_folder)
    assert own.probe.bfloat16_tolerance == 0.2


def test_the_next_version_of_a_policy_is_allowed_what_bfloat16_did_to_this_one(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    own = saved(model_of("llama", tokenizer_folder), tmp_path / "own", tokenizer_folder)
    written = Path(own.path, "policy.json")
    written.write_text(written.read_text().replace('"bfloat16_tolerance":0.2', '"bfloat16_tolerance":0.7'))
    model = load_policy(Path(own.path))
    later = save_policy(tmp_path / "later", model, Path(own.path), step=1, renderer="qwen3", thinking=False)
    assert later.probe.bfloat16_tolerance == 0.7


def as_from_elsewhere(folder: Path, source: Path, **config: object) -> Path:
    """The model of a policy folder without our word beside it, and with another configuration."""
    shutil.copytree(source, folder)
    (folder / "policy.json").unlink()
    changed = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


def test_a_model_from_elsewhere_is_described_as_our_own_are(tokenizer_folder: Path, tmp_path: Path) -> None:
    own = create_policy(tmp_path / "own", tokenizer_folder, SMALL, seed=0)
    model = as_from_elsewhere(tmp_path / "model", tmp_path / "own")
    assert describe_model(model, renderer="qwen3", thinking=False) == replace(own, path=str(model))


HEAD = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
NEVER_THINKS = HEAD + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MAY_THINK = NEVER_THINKS.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "thinking", "warned"),
    [
        (NEVER_THINKS, True, False),
        (NEVER_THINKS, False, True),
        (MAY_THINK, True, False),
        (MAY_THINK, False, False),
        ("{{ raise_exception('no') }}", True, False),
        ("{{ nothing", True, False),
        (None, False, False),
    ],
)
def test_a_prompt_that_ends_otherwise_than_the_models_own_is_told(
    template: str | None, thinking: bool, warned: bool, tokenizer_folder: Path, tmp_path: Path, caplog: Any
) -> None:
    create_policy(tmp_path / "own", tokenizer_folder, SMALL, seed=0)
    model = as_from_elsewhere(tmp_path / "model", tmp_path / "own")
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    describe_model(model, renderer="qwen3", thinking=thinking)
    assert ("try the other policy.thinking" in caplog.text) == warned, caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "its weights are not those of its config.json: 4 unexpected_keys"),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            "not those of its config.json: 11 missing_keys",
        ),
        ({"hidden_size": 32}, "no model that can be loaded"),
        ({"model_type": "mamba"}, "no model that can be loaded"),
        ({"model_type": "nothing"}, "no model that can be loaded"),
    ],
)
def test_a_model_that_is_not_what_its_configuration_says_is_refused(
    tokenizer_folder: Path, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    create_policy(tmp_path / "own", tokenizer_folder, SMALL, seed=0)
    model = as_from_elsewhere(tmp_path / "model", tmp_path / "own", **config)
    with pytest.raises(UserError, match=f"{model}: .*{message}"):
        describe_model(model, renderer="qwen3", thinking=False)


def test_a_model_with_truncated_or_broken_weights_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    create_policy(tmp_path / "own", tokenizer_folder, SMALL, seed=0)
    model = as_from_elsewhere(tmp_path / "model", tmp_path / "own")
    weights = load_file(model / "model.safetensors")
    save_file(
        {name: tensor * float("nan") for name, tensor in weights.items()}, model / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UserError, match="log-probs are not finite"):
        describe_model(model, renderer="qwen3", thinking=False)
    os.truncate(model / "model.safetensors", 1000)
    with pytest.raises(UserError, match="no model that can be loaded: SafetensorError"):
        describe_model(model, renderer="qwen3", thinking=False)
