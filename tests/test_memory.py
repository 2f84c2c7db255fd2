"""Memory does not grow with the number of blocks."""

import os
import subprocess
import sys

import pytest
import torch
import transformers

# ru_maxrss would count the process that started this one too.
MEASURE = """
import re, sys, torch, gptqkit
tokens = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0))
config = gptqkit.QuantizeConfig(method="rtn", true_sequential=False)
gptqkit.quantize(sys.argv[1], tokens, sys.argv[2], config, sequence_length=32, activations="disk", device="cpu")
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_model_of_eight_times_the_size_takes_no_more_memory(tmp_path):
    peaks, weights = {}, {}
    for blocks in (4, 32):
        config = transformers.LlamaConfig(
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=blocks,
            num_attention_heads=8,
            vocab_size=96,
            dtype="float16",
        )
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        model = model.to_empty(device="cpu").half()
        for parameter in model.parameters():
            parameter.data.normal_(std=0.02)
        weights[blocks] = sum(parameter.numel() for parameter in model.parameters())
        model.save_pretrained(tmp_path / str(blocks))
        del model
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        run = subprocess.run(
            [sys.executable, "-c", MEASURE, tmp_path / str(blocks), tmp_path / f"{blocks}-q"],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
        peaks[blocks] = int(run.stdout) * 1024
    whole = 4 * weights[32]  # in float32, in which the CPU works
    assert weights[32] > 7 * weights[4]
    assert peaks[32] < 1.15 * peaks[4], "more memory for more blocks"
    assert peaks[4] + whole / 2 > 1.15 * peaks[4], "half of the float model would have been noticed"
