"""Quantized experts, composite models and encoders: what is loaded equals the float model with dequantized weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptqkit.errors import BackendError, CheckpointError
from gptqkit.export.names import StoredNames
from gptqkit.kernels.experts import QuantExperts
from gptqkit.kernels.linear import QuantLinear
from gptqkit.loading import load, load_float
from gptqkit.quantizer.config import QuantizeConfig
from gptqkit.quantizer.modules import find_blocks, find_targets
from gptqkit.quantizer.solver import solve_rtn
from support.checkpoints import write_checkpoint
from support.models import MIXTURES, OTHERS, build, windows

CONFIG = QuantizeConfig(group_size=32, sym=False, method="rtn")


def write(model, out, *, skip=(), carried=None):
    """A checkpoint of `model` in its files' names, blocks rounded; `model` gets the dequantized weights."""
    names = StoredNames(model)
    tensors = {}
    for parameter, value in model.state_dict().items():
        if parameter not in model.all_tied_weights_keys:
            tensors |= names.cut(parameter, value)
    weights = {}
    prefix, blocks = find_blocks(model)
    for layer, block in enumerate(blocks):
        for target in find_targets(block, f"{prefix}.{layer}", CONFIG):
            if target.name in skip:
                continue
            solved = solve_rtn(target.weight.detach(), CONFIG).weight
            target.replace_weight(solved.dequantize())
            for part in names.parts(target.parameter):
                if part.expert == target.expert:
                    weights[part.module] = solved if part.rows is None else solved.rows(part.rows)
    others = {name: tensor.clone() for name, tensor in tensors.items() if name.removesuffix(".weight") not in weights}
    write_checkpoint(
        out,
        config=CONFIG,
        weights=weights,
        other_tensors={**others, **(carried or {})},
        model_config={**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]},
        report={"model": "example"},
    )
    return weights


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def outputs(model):
    with torch.no_grad():
        found = model(input_ids=windows().input_ids)
    return found.logits if "logits" in found else found.last_hidden_state


@pytest.mark.parametrize("name", [*MIXTURES, *OTHERS])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_outputs_equal_those_of_the_dequantized_model(name, backend, tmp_path):
    model = build(name)
    weights = write(model, tmp_path / "q")
    model.config._experts_implementation = "eager"
    loaded, _ = load(tmp_path / "q", device="cpu", backend=backend)
    assert type(loaded) is type(model)
    assert not any(tensor.is_meta for tensor in loaded.state_dict().values())
    assert sum(isinstance(module, QuantLinear) for module in loaded.modules()) == len(weights)
    assert torch.allclose(outputs(loaded), outputs(model), rtol=0, atol=1e-5 * float(outputs(model).abs().max()))
    if name in MIXTURES:
        assert isinstance(loaded.model.layers[-1].mlp.experts.down_proj, QuantExperts)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_that_stay_in_floating_point_beside_quantized_ones(name, tmp_path):
    model = build(name)
    skip = {
        f"model.layers.0.mlp.experts.{expert}.{part}" for expert in (0, 2) for part in ("gate_up_proj", "down_proj")
    }
    skip |= {f"model.layers.1.mlp.experts.{expert}.down_proj" for expert in range(4)}
    write(model, tmp_path / "q", skip=skip)
    model.config._experts_implementation = "eager"
    loaded, _ = load(tmp_path / "q", device="cpu", backend="torch")
    assert isinstance(loaded.model.layers[1].mlp.experts.down_proj, torch.nn.Parameter)
    assert torch.allclose(outputs(loaded), outputs(model), rtol=0, atol=1e-5 * float(outputs(model).abs().max()))


def test_a_bias_of_all_experts_may_stay_in_one_tensor(tmp_path):
    model = build("gpt_oss")
    write(model, tmp_path / "q")

    def join(tensors):
        for layer in range(2):
            path = f"model.layers.{layer}.mlp.experts"
            for part in ("gate_proj", "up_proj", "down_proj"):
                for expert in range(4):
                    del tensors[f"{path}.{expert}.{part}.bias"]
            for key in ("gate_up_proj_bias", "down_proj_bias"):
                tensors[f"{path}.{key}"] = model.state_dict()[f"{path}.{key}"]

    rewrite(tmp_path / "q", join)
    model.config._experts_implementation = "eager"
    loaded, _ = load(tmp_path / "q", device="cpu", backend="torch")
    assert torch.allclose(outputs(loaded), outputs(model), rtol=0, atol=1e-5 * float(outputs(model).abs().max()))


def test_carried_tensors_are_ignored_and_no_others(tmp_path):
    model = build("deepseek_v3")
    write(model, tmp_path / "q", carried={"model.layers.3.eh_proj.weight": torch.zeros(64, 128)})
    with pytest.raises(CheckpointError, match=r"eh_proj\.weight: no place"):
        load(tmp_path / "q", device="cpu")
    for file in ("config.json", "quantize_config.json"):
        values = json.loads((tmp_path / "q" / file).read_text())
        meta = values.get("quantization_config", values)["meta"]
        meta["carried_tensors"] = ["model.layers.3.eh_proj.weight"]
        (tmp_path / "q" / file).write_text(json.dumps(values))
    load(tmp_path / "q", device="cpu")


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("model.layers.1.mlp.experts.2.up_proj.", r"lacks model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight"),
        ("model.layers.1.mlp.experts.2.up_proj.bias", r"lacks model\.layers\.1\.mlp\.experts\.2\.up_proj\.bias"),
        ("model.layers.0.mlp.router.bias", r"lacks model\.layers\.0\.mlp\.router\.bias"),
    ],
)
def test_what_is_missing_is_named(remove, message, tmp_path):
    write(build("gpt_oss"), tmp_path / "q")

    def change(tensors):
        for name in [name for name in tensors if name.startswith(remove)]:
            del tensors[name]

    rewrite(tmp_path / "q", change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "q", device="cpu")


def test_experts_of_another_shape_are_refused(tmp_path):
    write(build("mixtral"), tmp_path / "q")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    (tmp_path / "q" / "config.json").write_text(json.dumps({**config, "intermediate_size": 128}))
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.qweight stands for 96 x 64 .* has 128 x 64"):
        load(tmp_path / "q", device="cpu")


def test_quantized_experts_do_nothing_but_products(tmp_path):
    write(build("mixtral"), tmp_path / "q")
    loaded, _ = load(tmp_path / "q", device="cpu")
    with pytest.raises(BackendError, match=r"neither F\.linear nor a plain product"):
        torch.bmm(torch.randn(1, 2, 64), loaded.model.layers[0].mlp.experts.down_proj[0])


@pytest.mark.parametrize("name", OTHERS)
def test_float_models_of_any_class(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path)
    loaded, _ = load_float(tmp_path, device="cpu")
    assert type(loaded) is type(model)
    assert torch.equal(outputs(loaded), outputs(model))
