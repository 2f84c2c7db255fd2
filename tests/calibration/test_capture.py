"""One block at a time, against whole forward passes."""

import pytest
import torch
from torch import nn

from gptqkit.calibration.capture import (
    block_call,
    capture_inputs,
    forwards_replaced,
    hand_on,
    routed_tokens,
    routing,
    trace_inputs,
    trace_sums,
)
from gptqkit.targets import find_blocks, is_matrix
from support.models import MIXTURES, MODELS, OTHERS, build, samples


def batch_of(*, padded):
    tokens = samples(padded=padded)
    mask = {} if tokens.attention_mask is None else {"attention_mask": tokens.attention_mask}
    return {"input_ids": tokens.input_ids, **mask}


def first(output):
    return output[0] if isinstance(output, (tuple, list)) else output


@torch.no_grad()
@pytest.mark.parametrize("name", [*MODELS, *MIXTURES, *OTHERS])
def test_block_by_block_equals_the_whole_forward_pass(name):
    """Also on hidden states that the model did not compute in this pass, and with masks that differ between blocks."""
    model, batch = build(name), batch_of(padded=True)
    [named] = find_blocks(model)
    assert all(model.get_submodule(path) is block for path, block in named.items())
    blocks = nn.ModuleList(named.values())
    own = blocks[0].forward

    def put_by_somebody(*arguments, **named):  # as accelerate does
        return own(*arguments, **named)

    blocks[0].forward = put_by_somebody
    seen = []
    hooks = [block.register_forward_hook(lambda _, __, output: seen.append(output)) for block in blocks]
    head = model.get_output_embeddings()
    if head is not None:
        hooks.append(head.register_forward_hook(lambda _, given, __: seen.append(given[0])))
    model(**batch)
    for hook in hooks:
        hook.remove()
    returned = len(seen[0]) if isinstance(seen[0], (tuple, list)) else 0
    hidden = block_call(model, blocks, batch, []).hidden
    for layer, block in enumerate(blocks):
        hidden = first(block_call(model, blocks, batch, [hand_on(returned)] * layer)(block, hidden))
        assert torch.equal(hidden, first(seen[layer]))
    if head is not None:
        before = [*[hand_on(returned)] * (len(blocks) - 1), hand_on(returned, leaving=hidden)]
        with forwards_replaced(blocks, before):
            assert torch.equal(capture_inputs({"head": head}, lambda: model(**batch))["head"][0], seen[-1])
    assert blocks[0].forward is put_by_somebody
    assert all("forward" not in vars(block) for block in blocks[1:])


# Linears of the first block in the order in which they run; those in one tuple share an input.
LLAMA = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
NEOX = [("query_key_value",), ("dense",), ("dense_h_to_4h",), ("dense_4h_to_h",)]
ORDERS = {
    "llama": LLAMA,
    "gemma3": LLAMA,
    "phi3": [("qkv_proj",), ("o_proj",), ("gate_up_proj",), ("down_proj",)],
    "opt": [("q_proj", "k_proj", "v_proj"), ("out_proj",), ("fc1",), ("fc2",)],
    "gpt2": [("c_attn",), ("c_proj",), ("c_fc",), ("c_proj",)],
    "gpt_neox": NEOX,
    "falcon": NEOX,  # attention and MLP run in parallel, from two layer norms
}


@torch.no_grad()
@pytest.mark.parametrize("name", ORDERS)
def test_linears_are_found_in_the_order_of_their_calls_with_what_they_share(name):
    model, batch = build(name), batch_of(padded=False)
    [named] = find_blocks(model)
    blocks = nn.ModuleList(named.values())
    modules = {inner: module for inner, module in blocks[0].named_modules() if is_matrix(module)}
    expected, hooks = {}, []
    for inner, module in modules.items():
        hook = module.register_forward_pre_hook(
            lambda _, given, inner=inner: expected.update({inner: given[0].clone()})
        )
        hooks.append(hook)
    model(**batch)
    for hook in hooks:
        hook.remove()
    call = block_call(model, blocks, batch, [])
    found = trace_inputs(modules, lambda: call(blocks[0], call.hidden))
    shared = [tuple(inner.rpartition(".")[2] for inner in names) for names, _ in found]
    assert shared == ORDERS[name]
    captured = capture_inputs(modules, lambda: call(blocks[0], call.hidden))
    assert {inner for names, _ in found for inner in names} == captured.keys() == modules.keys()
    for names, received in found:
        for inner in names:
            for [tensor] in (received, captured[inner]):
                assert torch.equal(tensor, expected[inner])


BEFORE_MLP = {"self_attn.o_proj": "", "mlp.down_proj": "post_attention_layernorm"}
# What outputs of Linears of the first block are added to, as it enters the block ("") or another module.
SUMS = {
    "llama": BEFORE_MLP,
    "phi3": BEFORE_MLP,
    "gpt2": {"attn.c_proj": "", "mlp.c_proj": "ln_2"},
    "opt": {"self_attn.out_proj": "", "fc2": "final_layer_norm"},  # as rows of all samples
    "bert": {"attention.output.dense": "", "output.dense": "intermediate"},
    "falcon": {"mlp.dense_4h_to_h": ""},  # to which attention's are added later
    "gemma3": {},  # normalized before they are added
}


@torch.no_grad()
@pytest.mark.parametrize("name", SUMS)
def test_it_is_found_what_outputs_are_added_to(name):
    model, batch = build(name), batch_of(padded=False)
    [named] = find_blocks(model)
    blocks = nn.ModuleList(named.values())
    modules = {inner: module for inner, module in blocks[0].named_modules() if is_matrix(module)}
    call = block_call(model, blocks, batch, [])
    assert trace_sums(blocks[0], modules, lambda: first(call(blocks[0], call.hidden))) == SUMS[name]


@torch.no_grad()
def test_sums_that_are_written_over_are_none():
    block = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})

    def run():
        x = torch.ones(2, 4)
        block["a"](x)
        y = x + block["b"](x)
        z = y * 2
        y += block["c"](z)
        return y

    assert trace_sums(block, {name: block[name] for name in "abc"}, run) == {}


def test_what_is_written_over_in_place_is_another_input_and_a_run_ends_when_all_were_called():
    layers, calls = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcd"}), []
    layers["d"].register_forward_pre_hook(lambda *_: calls.append(1))

    def run():
        x = torch.ones(2, 4)
        for name in "ab":
            layers[name](x)
        x.add_(1)
        layers["c"](x)
        layers["d"](x[:, :].clone())
        layers["a"](x)

    traced = trace_inputs(dict(layers.items()), run)
    assert [(names, len(received)) for names, received in traced] == [(["a"], 2), (["b"], 1), (["c"], 1), (["d"], 1)]
    assert [len(x) for x in capture_inputs({name: layers[name] for name in "ab"}, run, {"a"}).values()] == [2, 1]
    calls.clear()
    assert list(capture_inputs({name: layers[name] for name in "abc"}, run)) == ["a", "b", "c"]
    assert not calls
    assert list(capture_inputs({"a": layers["a"], "x": nn.Linear(4, 4)}, run)) == ["a"]


@torch.no_grad()
def test_tokens_go_where_they_are_sent():
    """Experts on other hidden states, with the routing of the first: the tokens and weights that transformers used."""
    model, other = build("qwen3_moe"), build("qwen3_moe")
    experts = {"mlp": model.model.layers[0].mlp.experts}
    with routing(experts) as taken:
        model(**batch_of(padded=False))
    other.get_input_embeddings().weight.add_(torch.randn(96, 64))
    seen = []
    own = {"mlp": other.model.layers[0].mlp.experts}
    with routing(own) as chosen:
        other(**batch_of(padded=False))
    own["mlp"].forward = lambda *given: (seen.append(given), given[0])[1]
    with routing(own, impose=taken):
        other(**batch_of(padded=False))
    assert not torch.equal(chosen["mlp"][0], taken["mlp"][0])
    for given, expected in zip(seen[0][1:], taken["mlp"], strict=True):
        assert torch.equal(given, expected)
    table = taken["mlp"][0]
    for expert in range(4):
        tokens, slots = routed_tokens(table, expert)
        assert tokens.tolist() == [token for token in range(len(table)) if expert in table[token].tolist()]
        assert all(table[token, slot] == expert for token, slot in zip(tokens, slots, strict=True))
