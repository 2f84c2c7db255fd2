"""Sizes come from shapes alone, and are those of the real thing."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

import gptqkit
from gptqkit.budget import make_plan
from gptqkit.calibration.hessian import InputStatistics
from gptqkit.export.gptq import to_tensors
from gptqkit.footprint import Footprint
from gptqkit.machine import Machine
from gptqkit.matrices import decided_bytes, solver_bytes, stored_bytes
from gptqkit.quantizer.config import ModuleOverride, QuantizeConfig
from gptqkit.quantizer.modules import Target, find_blocks
from gptqkit.quantizer.ranks import Ranks
from gptqkit.quantizer.solver import solve_rtn
from gptqkit.quantizer.solving import Solving
from gptqkit.quantizer.walk import quantize_blocks
from gptqkit.sizes import FILE_BYTES, measure, shapes_of
from gptqkit.workload import Workload
from support.models import MIXTURES, MODELS, build, windows

CPU, GPU = torch.device("cpu"), torch.device("cuda")
UNKNOWN = Machine(memory=None, program=0, gpu=None, disk=None)


def workload(device=CPU, samples=8, writes=True, statistics_bytes=1 << 30, **changes):
    return Workload(
        config=QuantizeConfig(**{"group_size": 32, **changes}),
        sequence_length=48,
        device=device,
        samples=samples,
        writes=writes,
        statistics_bytes=statistics_bytes,
    )


def bytes_of(module):
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def statistics(kind):
    """Of each pass that gathers some."""
    return [phase.statistics for phase in kind.phases if phase.statistics and phase.solved is None]


def test_weights_statistics_and_states_are_counted_as_they_are():
    """mistral: width 64, 2 of 4 heads for keys, feed-forward 96, 96 tokens, not tied; bfloat16 in its files."""
    model = build("mistral").bfloat16()
    block = find_blocks(model)[1][0]
    on_gpu = measure(shapes_of(model), workload(device=GPU))
    [kind] = on_gpu.blocks
    assert (on_gpu.layers, kind.count, kind.name, kind.traced) == (2, 2, "model.layers.0", True)
    assert kind.weights == 2 * bytes_of(block)  # as stored, and quantized
    width, inner = InputStatistics(64, CPU), InputStatistics(96, CPU)
    wanted = [width, width, width, inner]  # q, k and v share an input, so do gate and up
    assert statistics(kind) == [sums.sums[0].nbytes for sums in wanted]
    assert on_gpu.state == torch.zeros(48, 64, dtype=torch.bfloat16).nbytes
    outside = bytes_of(model) - bytes_of(find_blocks(model)[1]) - bytes_of(model.lm_head)
    assert on_gpu.outside == outside
    assert on_gpu.source == sum(tensor.nbytes for tensor in model.state_dict().values())

    on_cpu = measure(shapes_of(model), workload(method="gptaq"))
    assert on_cpu.state == torch.zeros(48, 64).nbytes
    kind = on_cpu.blocks[0]
    assert kind.weights == bytes_of(block) + 2 * bytes_of(block.float())  # and what GPTAQ compares with
    assert statistics(kind) == [2 * sums.sums[0].nbytes for sums in wanted]
    assert on_cpu.outside == pytest.approx(3 * outside, abs=200)  # bfloat16 and float32; buffers are float32 once


def test_without_true_sequential_all_statistics_are_there_at_once():
    sizes = measure(shapes_of(build("mistral")), workload(true_sequential=False))
    assert statistics(sizes.blocks[0])[0] == 8 * (3 * 64 * 64 + 96 * 96)


def test_blocks_of_several_kinds_and_the_output_layer_are_told_apart():
    overrides = {"layers.1.mlp": ModuleOverride(bits=8), "down_proj": ModuleOverride(skip=True)}
    sizes = measure(shapes_of(build("mistral")), workload(overrides=overrides, lm_head=True))
    assert [kind.name for kind in sizes.blocks] == ["model.layers.0", "model.layers.1", "lm_head"]
    assert sizes.blocks[2].weights == 2 * 4 * 96 * 64


def test_blocks_without_anything_to_quantize_are_run_and_not_solved():
    sizes = measure(shapes_of(build("mistral")), workload(overrides={"layers.0.": ModuleOverride(skip=True)}))
    assert [len(statistics(kind)) for kind in sizes.blocks] == [0, 4]
    [phase] = sizes.blocks[0].phases
    assert phase.sample > 0


def test_measuring_needs_no_weights_and_leaves_the_model_alone():
    model = build("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copied = shapes_of(model)
    measure(copied, workload())
    assert all(tensor.is_meta for tensor in copied.state_dict().values())
    assert copied.lm_head.weight is copied.model.embed_tokens.weight  # tied, as in the model
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(64, 512), (512, 128), (256, 256)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "gptaq"},
        {"method": "rtn"},
        {"method": "gptaq", "float64": True},
        {"group_size": -1},
        {"sym": False, "mse": False, "desc_act": True},
    ],
)
def test_the_solver_takes_what_the_formula_says(changes, rows, columns, dtype):
    config = QuantizeConfig(**{"group_size": 64, **changes})
    x = torch.randn(2 * columns, columns, generator=torch.Generator().manual_seed(0))
    statistics = InputStatistics(columns, CPU, cross=config.method == "gptaq")
    statistics.update(x, x.roll(1) if config.method == "gptaq" else None)
    target = Target("module", nn.Linear(columns, rows, bias=False, dtype=dtype), config, "module.weight")
    with torch.no_grad(), Footprint() as footprint:
        Solving(config, Ranks.alone(), lambda _: None, 1, None, None).solve([target], 0, [statistics], None)
    formula = solver_bytes(target, calibrated=True)
    assert 0.97 * footprint.peak < formula < 1.15 * footprint.peak


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, -1])
def test_quantized_weights_are_as_large_as_the_formulas_say(bits, group_size):
    config = QuantizeConfig(bits=bits, group_size=group_size)
    target = Target("module", nn.Linear(96, 64, bias=False), config, "module.weight")
    weight = solve_rtn(target.weight, config).weight
    tensors = (weight.codes, weight.scale, weight.zero, weight.group_index)
    assert decided_bytes(target) == sum(tensor.nbytes for tensor in tensors)
    assert stored_bytes(target) == sum(tensor.nbytes for tensor in to_tensors(weight, "gptq_v2").values())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("changes", [{}, {"bits": 3, "overrides": {"0": ModuleOverride(skip=True)}}, {"bits": 8}])
def test_a_written_checkpoint_is_as_large_as_measured(name, changes, tmp_path):
    model = build(name)
    asked = workload(method="rtn", samples=0, **changes)
    gptqkit.quantize(model, None, tmp_path / "out", asked.config)
    written = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert written == pytest.approx(measure(shapes_of(model), asked).output, abs=FILE_BYTES)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in (*MODELS, *MIXTURES)),
        *((name, {"method": "gptaq"}) for name in ("llama", "gpt2", "mixtral")),
        *((name, {"true_sequential": False}) for name in ("llama", "falcon", "qwen3_moe")),
        *((name, {"statistics_bytes": 1 << 16}) for name in ("mixtral", "qwen3_moe")),  # experts in several passes
        ("llama", {"true_sequential": False, "statistics_bytes": 1 << 16}),
    ],
)
def test_a_whole_run_holds_at_its_height_what_the_plan_says(name, changes):
    model = build(name).bfloat16()
    asked = workload(writes=False, **changes)
    asked = dataclasses.replace(asked, batch_size=4, activations="memory")
    need = make_plan(partial(measure, shapes_of(model)), asked, UNKNOWN).needs["RAM"]
    already_there = bytes_of(find_blocks(model)[1][0])
    with torch.no_grad(), Footprint() as footprint:
        quantize_blocks(
            model,
            windows(8, 48),
            asked.config,
            device=CPU,
            batch_size=4,
            statistics_bytes=asked.statistics_bytes,
        )
    expected = need.total - need.parts["allowance"] - already_there
    assert 0.9 * footprint.peak < expected < 1.2 * footprint.peak


@pytest.mark.parametrize(("name", "vocabulary"), [("llama", 96), ("gpt2", 96), ("qwen2", 4096), ("mistral", 4096)])
def test_the_evaluation_at_the_end_holds_what_the_plan_says(name, vocabulary, tmp_path):
    model = build(name, vocab_size=vocabulary, dtype=torch.bfloat16).bfloat16()
    asked = dataclasses.replace(workload(), evaluate_on="text")
    sizes = measure(shapes_of(model), asked).evaluation
    gptqkit.quantize(model, None, tmp_path / "out", QuantizeConfig(method="rtn", group_size=32))
    loaded, _ = gptqkit.load(tmp_path / "out", device="cpu")
    with Footprint() as footprint:
        gptqkit.evaluate(loaded, torch.randint(96, (8 * 48,)), sequence_length=48)
    assert sizes["quantized model"] == pytest.approx(bytes_of(loaded), rel=0.02)
    unseen = 48 * vocabulary * 4  # torch's own copy of a window's logits, inside cross_entropy
    assert 0.9 * footprint.peak < sizes["evaluation of 8 windows"] < 1.1 * (footprint.peak + unseen)
