"""A dozen of the families that `make families` tries: each has something that the pipeline must cope with."""

import pytest
import torch
from safetensors.torch import load_file

import families
import gptqkit

OK = {  # and how many Linears stay in floating point
    "bamba": 0,  # state spaces and attention
    "deberta-v2": 0,  # blocks that return tuples and share positions
    "deepseek_v2": 0,  # latent attention, experts
    "falcon_h1": 0,  # both in one block
    "gemma3n_text": 6,  # several versions of the hidden states; odd shapes
    "gemma4_unified_text": 0,  # keys and values handed from block to block
    "inkling2_text": 1,  # stored names that do not end in .weight
    "lfm2_moe": 0,  # blocks of two kinds
    "longt5": 0,  # both stacks; position biases handed from block to block
    "mamba2": 0,
    "marian": 0,  # both stacks; positions that are in no file
    "qwen3_5": 2,  # linear attention, with two Linears of odd shapes
    "recurrent_gemma": 0,
    "whisper": 8,  # a decoder by itself: nothing calls its attention to an encoder
    "zamba2": 0,  # blocks that share weights
}
REFUSED = {
    "musicgen": "has no embedding of token ids",
    "pegasus_x": "hands on more than hidden states",
    "reformer": "returns a ReformerOutput, not hidden states",
    "xlnet": "has its samples in another axis",
}


def tried(family, folder):
    kinds = ["encoder-decoder", *families.KINDS]
    kind = next(kind for kind in kinds if family in families.KINDS[kind])
    return families.outcome(kind, family, folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", OK)
def test_what_is_loaded_computes_what_the_float_model_does_with_its_weights(family, tmp_path):
    found = tried(family, tmp_path)
    assert found["result"] == "ok", found
    assert found["left"] == OK[family]
    assert found["distance"] < 0.7


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_done_is_refused_before_any_work(family, tmp_path):
    found = tried(family, tmp_path)
    assert found["result"] == "refused", found
    assert REFUSED[family] in found["why"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["float"]


@pytest.mark.filterwarnings("ignore")
def test_resuming_a_model_with_hidden_states_of_another_form(tmp_path):
    _, inputs = families.build("language model", "gemma3n_text", tmp_path / "float")
    calibration = gptqkit.Calibration(inputs["input_ids"], sequence_length=32)

    def stop(progress):
        if progress.layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gptqkit.quantize(tmp_path / "float", calibration, tmp_path / "resumed", progress=stop)
    gptqkit.quantize(tmp_path / "float", calibration, tmp_path / "resumed", run=gptqkit.Run(resume=True))
    gptqkit.quantize(tmp_path / "float", calibration, tmp_path / "whole")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("resumed", "whole"))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
