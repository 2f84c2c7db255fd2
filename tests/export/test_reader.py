"""Checkpoints of other programs: what they leave out or name differently, built by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gptqkit.errors import CheckpointError
from gptqkit.export.quantization_config import read_settings
from gptqkit.export.reader import open_checkpoint

NAME = "model.layers.3.self_attn.o_proj"

Foreign = Callable[..., Path]


@pytest.fixture
def foreign(tmp_path: Path) -> Foreign:
    """A checkpoint with one 4-bit layer: code 5 everywhere, stored zeros 7, scales 0.5, 32 outputs, 64 inputs."""

    def write(
        *,
        config: dict[str, Any] | None = None,
        beside: dict[str, Any] | None = None,
        file: str = "model.safetensors",
        drop: str = "",
        scales: torch.dtype = torch.float16,
        index: torch.Tensor | None = None,
    ) -> Path:
        tensors = {
            f"{NAME}.qweight": torch.full((8, 32), 0x55555555, dtype=torch.int32),
            f"{NAME}.qzeros": torch.full((2, 4), 0x77777777, dtype=torch.int32),
            f"{NAME}.scales": torch.full((2, 32), 0.5, dtype=scales),
            f"{NAME}.g_idx": (torch.arange(64) // 32).int() if index is None else index,
        }
        save_file({name: tensor for name, tensor in tensors.items() if not name.endswith(drop or "?")}, tmp_path / file)
        model = {"model_type": "llama", **({"quantization_config": config} if config else {})}
        (tmp_path / "config.json").write_text(json.dumps(model))
        if beside:
            (tmp_path / "quantize_config.json").write_text(json.dumps(beside))
        return tmp_path

    return write


AUTOGPTQ = {"bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": False, "sym": True, "true_sequential": True}
OPTIMUM = {**AUTOGPTQ, "quant_method": "gptq", "dataset": "c4", "tokenizer": None, "batch_size": 1, "bits": 4}


def test_autogptq_without_config_in_the_model_config(foreign: Foreign) -> None:
    beside = {**AUTOGPTQ, "model_name_or_path": None, "model_file_base_name": "gptq_model-4bit-32g"}
    path = foreign(beside=beside, file="gptq_model-4bit-32g.safetensors")
    save_file({"unrelated": torch.zeros(1)}, path / "other.safetensors")
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "gptq"
    assert bool((checkpoint.quantized_weight(NAME).dequantize() == (5 - 8) * 0.5).all())


def test_optimum_with_any_file_name(foreign: Foreign) -> None:
    checkpoint = open_checkpoint(foreign(config=OPTIMUM, file="whatever.safetensors"))
    assert (checkpoint.bits, checkpoint.group_size, checkpoint.sym) == (4, 32, True)
    assert checkpoint.model_config["model_type"] == "llama"


def test_gptqmodel_version_2(foreign: Foreign) -> None:
    config = {**OPTIMUM, "format": "gptq", "checkpoint_format": "gptq_v2", "meta": {"quantizer": ["gptqmodel:7.5.0"]}}
    checkpoint = open_checkpoint(foreign(config=config))
    assert (checkpoint.format, checkpoint.settings.writer) == ("gptq_v2", "gptqmodel:7.5.0")
    assert bool((checkpoint.quantized_weight(NAME).dequantize() == (5 - 7) * 0.5).all())


def test_missing_group_index_is_trivial(foreign: Foreign) -> None:
    checkpoint = open_checkpoint(foreign(config=OPTIMUM, drop="g_idx"))
    assert not checkpoint.layers[NAME].act_order
    assert torch.equal(checkpoint.layer(NAME)["g_idx"], (torch.arange(64) // 32).int())
    assert checkpoint.quantized_weight(NAME).trivial_group_index


def test_act_order_is_what_the_tensor_says(foreign: Foreign) -> None:
    index = (torch.arange(64) % 2).int()
    checkpoint = open_checkpoint(foreign(config=OPTIMUM, index=index))
    assert not checkpoint.desc_act
    assert checkpoint.layers[NAME].act_order
    assert torch.equal(checkpoint.layer(NAME)["g_idx"], index)


def test_bfloat16_scales_stay_as_they_are_in_the_layer(foreign: Foreign) -> None:
    checkpoint = open_checkpoint(foreign(config=OPTIMUM, scales=torch.bfloat16))
    assert checkpoint.layer(NAME)["scales"].dtype == torch.bfloat16
    assert checkpoint.quantized_weight(NAME).scale.dtype == torch.float16


def test_tensors_are_mapped_as_they_lie_in_the_file(foreign: Foreign) -> None:
    layer = open_checkpoint(foreign(config=OPTIMUM)).layer(NAME)
    assert layer["qweight"].shape == (8, 32)
    assert layer["qzeros"].dtype == torch.int32
    assert layer["bias"] is None


def test_dynamic_settings_hold_for_the_first_pattern_from_the_start_of_the_name() -> None:
    dynamic = {
        r"-:model\.layers\.0\.": {},
        r"o_proj": {"bits": 2},  # GPTQModel matches from the start: this hits nothing
        r".*\.3\..*o_proj": {"bits": 8, "group_size": -1, "sym": False},
        r"+:.*o_proj": {"bits": 3},
    }
    settings = read_settings({**AUTOGPTQ, "dynamic": dynamic}, "here")
    assert settings.for_module("model.layers.3.self_attn.o_proj") == (8, None, False)
    assert settings.for_module("model.layers.4.self_attn.o_proj") == (3, 32, True)
    assert settings.for_module("model.layers.4.self_attn.q_proj") == (4, 32, True)


def test_no_dynamic_settings_in_either_spelling() -> None:
    for absent in (None, {}, False):
        assert read_settings({**AUTOGPTQ, "dynamic": absent}, "here").for_module("x") == (4, 32, True)


def test_swapped_three_bit_zeros_are_refused(foreign: Foreign) -> None:
    path = foreign(config={**OPTIMUM, "bits": 3})
    words = torch.tensor([0x24924924 - 0x24924924, 0xB6DB6DB7 - (1 << 32), 0x92492492 - 0x49249249], dtype=torch.int32)
    save_file(
        {
            f"{NAME}.qweight": torch.zeros(6, 32, dtype=torch.int32),
            f"{NAME}.qzeros": words.repeat(2, 1),
            f"{NAME}.scales": torch.ones(2, 32).half(),
        },
        path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"GPTQModel before 7\.0"):
        open_checkpoint(path).layer(NAME)
