"""Experts: which matrices they are, and what each of them receives, against a plain loop over tokens."""

import pytest
import torch
import transformers
from torch import nn

from gptqkit.errors import ArchitectureError, ConfigError
from gptqkit.quantizer.config import ModuleOverride, QuantizeConfig
from gptqkit.quantizer.experts import eager_experts, is_stacked
from gptqkit.quantizer.modules import check_overrides, find_blocks, find_targets
from gptqkit.quantizer.stream import BlockStream, float_copy, working_copy
from support.models import GROUPED, MIXTURES, OTHERS, build, windows

CONFIG = QuantizeConfig(group_size=32)


def open_block(name, layer=-1, **changes):
    """A model, the stream of its blocks, the number and targets of one of them, and what enters it."""
    model = build(name, **changes)
    prefix, blocks = find_blocks(model)
    layer %= len(blocks)
    targets = find_targets(blocks[layer], f"{prefix}.{layer}", CONFIG)
    stream = BlockStream(model, blocks)
    batch = {"input_ids": windows().input_ids}
    with torch.no_grad():
        hidden = stream.embed(batch)
        for earlier in range(layer):
            hidden = stream.run(earlier, batch, hidden)
    return model, stream, layer, targets, batch, hidden


def routes_of(model, experts, batch):
    """The arguments of a module of experts in a plain forward pass: tokens, their experts, the weights of these."""
    seen = []
    hook = experts.register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    with torch.no_grad():
        model(**batch)
    hook.remove()
    return seen[0]


def inputs_by_hand(experts, hidden, chosen):
    """(tokens, inputs) of every expert's two matrices: one token and one expert at a time."""
    first = {expert: [] for expert in range(4)}
    for slot in range(chosen.shape[1]):
        for token in range(len(hidden)):
            first[int(chosen[token, slot])].append(token)
    found = {}
    for expert, tokens in first.items():
        weight = experts.gate_up_proj[expert].T if experts.is_transposed is False else experts.gate_up_proj[expert]
        rows = hidden[tokens]
        up = rows @ weight + (experts.gate_up_proj_bias[expert] if experts.has_bias else 0)
        found[expert] = (tokens, rows, experts._apply_gate(up))
    return found


@pytest.mark.parametrize("name", MIXTURES)
def test_every_expert_receives_the_tokens_routed_to_it(name):
    model, stream, layer, targets, batch, hidden = open_block(name)
    experts = stream._blocks[layer].mlp.experts
    expected = inputs_by_hand(experts, *routes_of(model, experts, batch)[:2])
    with torch.no_grad():
        received, routing = stream.receive(layer, batch, hidden, targets)
    assert len(routing) == 1
    matrices = {target.name: target for target in targets if target.expert is not None}
    assert len(matrices) == 8
    for target, got in zip(targets, received, strict=True):
        if target.expert is None:
            assert got.tokens is None
            assert got.rows.shape[:-1].numel() == 6 * 24
            continue
        tokens, rows, intermediate = expected[target.expert]
        assert got.tokens.tolist() == tokens
        wanted = rows if target.name.endswith("gate_up_proj") else intermediate
        assert torch.allclose(got.rows, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_weights_are_out_by_in_and_are_replaced_where_they_lie(name):
    model, _, _, targets, _, _ = open_block(name)
    for target in targets:
        parameter = model.get_parameter(target.parameter)
        before = parameter.detach().clone()
        new = torch.randn(target.weight.shape)
        target.replace_weight(new)
        assert torch.equal(target.weight, new)
        if target.expert is not None:
            rest = [expert for expert in range(4) if expert != target.expert]
            assert torch.equal(model.get_parameter(target.parameter)[rest], before[rest])
    inner = 96 if name in ("mixtral", "gpt_oss") else 32
    shapes = {tuple(target.weight.shape) for target in targets if target.expert is not None}
    assert shapes == {(2 * inner, 64), (64, inner)}


def test_a_working_copy_has_stacked_experts_of_its_own():
    model, stream, layer, targets, _, _ = open_block("mixtral")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with working_copy(stream._blocks[layer], torch.device("cpu"), torch.float32):
        for target in targets:
            target.replace_weight(torch.zeros_like(target.weight))
        assert not stream._blocks[layer].mlp.experts.down_proj.any()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_one_group_however_few_the_tokens(name):
    _, stream, layer, targets, batch, hidden = open_block(name)
    with torch.no_grad():
        groups = stream.trace(layer, {"input_ids": batch["input_ids"][:1, :1]}, hidden[:1, :1], targets)
    routed = [group for group in groups if group.routed]
    path = next(target.name for target in targets if target.expert is not None).rsplit(".", 2)[0]
    assert [group.stages for group in routed] == [
        [[f"{path}.{expert}.{part}"] for expert in range(4)] for part in ("gate_up_proj", "down_proj")
    ]
    assert {name for group in groups for stage in group.stages for name in stage} == {t.name for t in targets}


def test_an_expert_without_tokens_receives_no_rows():
    _, stream, layer, targets, batch, hidden = open_block("mixtral")
    one = {"input_ids": batch["input_ids"][:1, :1]}
    with torch.no_grad():
        received, _ = stream.receive(layer, one, hidden[:1, :1], targets)
    counts = [len(got.rows) for target, got in zip(targets, received, strict=True) if target.name.endswith("up_proj")]
    assert sorted(counts) == [0, 0, 1, 1]
    assert all(got.rows.shape[-1] == target.weight.shape[1] for target, got in zip(targets, received, strict=True))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_float_twin_can_be_given_the_same_routing(name):
    _, stream, layer, targets, batch, hidden = open_block(name)
    block = stream._blocks[layer]
    twin = float_copy(block)
    of_twin = dict(zip(block.modules(), twin.modules(), strict=True))
    twins = [target.within(of_twin[target.module]) for target in targets]
    other = hidden + torch.randn_like(hidden)  # routed in another way by itself
    with torch.no_grad():
        received, routing = stream.receive(layer, batch, hidden, targets)
        own, _ = stream.receive(layer, batch, other, twins, twin)
        given, used = stream.receive(layer, batch, other, twins, twin, routing)
    chosen = [index for index, target in enumerate(targets) if target.expert is not None]
    assert any(len(own[index].rows) != len(received[index].rows) for index in chosen)
    for index in chosen:
        assert torch.equal(given[index].tokens, received[index].tokens)
        if targets[index].name.endswith("gate_up_proj"):
            expected = used[targets[index].parameter.rpartition(".")[0]].hidden[received[index].tokens]
            assert torch.equal(given[index].rows, expected)
    for left, right in zip(received, given, strict=True):
        assert left.rows.shape == right.rows.shape


def test_tokens_of_rows_in_an_order_nobody_knows_are_not_guessed():
    model, stream, layer, targets, batch, hidden = open_block("mixtral")
    experts = model.model.layers[layer].mlp.experts
    original = experts.forward

    def backwards(tokens, chosen, weights):
        return original(tokens.flip(0), chosen, weights)

    experts.forward = backwards
    with torch.no_grad():
        received, _ = stream.receive(layer, batch, hidden, targets)
    assert all(got.tokens is None for target, got in zip(targets, received, strict=True) if target.expert is not None)


class ListOfExperts(nn.Module):
    """Experts as a list of modules, as code outside transformers has them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"w1": nn.Linear(64, 96), "w2": nn.Linear(96, 64)}) for _ in range(4)
        )

    def forward(self, hidden_states):
        flat = hidden_states.flatten(0, 1)
        chosen = self.gate(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).nonzero()[:, 0]
            if len(tokens):
                out[tokens] = expert["w2"](expert["w1"](flat[tokens]).relu())
        return out.view_as(hidden_states)


def test_experts_in_a_list_of_modules():
    model, *_ = open_block("mistral")
    torch.manual_seed(0)
    for block in model.model.layers:
        block.mlp = ListOfExperts()
    prefix, blocks = find_blocks(model)
    assert prefix == "model.layers"
    targets = find_targets(blocks[0], "model.layers.0", CONFIG)
    names = [target.name for target in targets]
    assert "model.layers.0.mlp.gate" not in names
    stream = BlockStream(model, blocks)
    batch = {"input_ids": windows().input_ids}
    one = {"input_ids": batch["input_ids"][:1, :3]}
    with torch.no_grad():
        hidden = stream.embed(batch)
        groups = stream.trace(0, one, hidden[:1, :3], targets)
        received, _ = stream.receive(0, batch, hidden, targets)
    experts = [[[f"model.layers.0.mlp.experts.{number}.{part}"] for number in range(4)] for part in ("w1", "w2")]
    assert [group.stages for group in groups if group.routed] == experts
    rows = [len(got.rows) for target, got in zip(targets, received, strict=True) if target.name.endswith("w1")]
    assert sum(rows) == 6 * 24


def test_routers_and_gates_stay_in_floating_point():
    for name, count in {"mixtral": 12, "qwen2_moe": 15, "qwen3_moe": 12, "deepseek_v3": 16, "gpt_oss": 12}.items():
        _, _, _, targets, _, _ = open_block(name)
        assert len(targets) == count
        assert not any(target.name.split(".")[-1] in ("gate", "router", "shared_expert_gate") for target in targets)


def test_experts_that_are_not_taken_one_by_one_stay_in_floating_point():
    config = transformers.Llama4TextConfig(
        **GROUPED, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1, pad_token_id=0
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    feed_forward = model.model.layers[0].feed_forward
    assert not is_stacked(feed_forward.experts)
    assert isinstance(feed_forward.router, nn.Linear)
    names = [target.name for target in find_targets(model.model.layers[0], "model.layers.0", CONFIG)]
    assert not any("router" in name or "experts" in name for name in names)
    assert sum("shared_expert." in name for name in names) == 3


@pytest.mark.parametrize(("name", "prefix"), [("llava", "model.language_model.layers"), ("bert", "encoder.layer")])
def test_blocks_of_composite_models_and_encoders(name, prefix):
    model = build(name)
    assert find_blocks(model)[0] == prefix
    seen = []
    for block in find_blocks(model)[1]:
        block.register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
    tokens = windows(padded=True)
    batch = {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask}
    stream = BlockStream(model, find_blocks(model)[1])
    with torch.no_grad():
        model(**batch)
        expected = list(seen)
        hidden = stream.embed(batch)
        for layer in range(2):
            hidden = stream.run(layer, batch, hidden)
            assert torch.equal(hidden, expected[layer])
    assert name in OTHERS


def test_overrides_reach_single_experts():
    config = QuantizeConfig(
        group_size=32,
        overrides={
            r"experts\.1\.": ModuleOverride(skip=True),
            r"experts\.\d+\.down_proj": ModuleOverride(bits=8),
        },
    )
    model = build("qwen3_moe")
    check_overrides(model, config)
    targets = find_targets(model.model.layers[0], "model.layers.0", config)
    assert {target.expert for target in targets} == {None, 0, 2, 3}
    assert {target.config.bits for target in targets if target.name.endswith("experts.3.down_proj")} == {8}
    with pytest.raises(ConfigError, match=r"matches no Linear of Qwen3Moe"):
        check_overrides(model, QuantizeConfig(overrides={r"experts\.4": ModuleOverride(skip=True)}))


def test_gate_and_up_projections_must_be_packed_apart():
    model = build("mixtral", intermediate_size=80)
    with pytest.raises(ConfigError, match=r"experts\.0\.gate_up_proj is \(2 x 80, 64\)"):
        find_targets(model.model.layers[0], "model.layers.0", CONFIG)


def test_eager_experts_for_a_while():
    model = build("mixtral")
    before = model.config._experts_implementation
    assert before != "eager"
    with eager_experts(model):
        assert model.config._experts_implementation == "eager"
    assert model.config._experts_implementation == before


def test_matrices_that_never_run_are_named():
    model, stream, layer, _, batch, hidden = open_block("mixtral")
    block = model.model.layers[layer]
    block.mlp.spare = nn.Linear(64, 64)
    targets = find_targets(block, f"model.layers.{layer}", CONFIG)
    with torch.no_grad(), pytest.raises(ArchitectureError, match=r"mlp\.spare: not called"):
        stream.trace(layer, batch, hidden, targets)
