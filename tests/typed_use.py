"""Calls as documented, which a type checker must take (`make check` runs mypy on this file; it is never run)."""

from pathlib import Path

import torch

import gptqkit

calibration = gptqkit.Calibration("text.txt", samples=16, sequence_length=512)
gptqkit.Calibration(["one.txt", "two.txt"])
gptqkit.Calibration([[1, 2, 3], [4, 5]])
gptqkit.Calibration(torch.zeros(4, 512, dtype=torch.long))
gptqkit.Calibration([{"input_ids": [1, 2]}])

config = gptqkit.QuantizeConfig(bits=4, group_size=128, sym=False, target_size="4GB")
gptqkit.QuantizeConfig(overrides={"down_proj$": {"bits": 8}, "up_proj$": gptqkit.ModuleOverride(skip=True)})
result = gptqkit.quantize("org/model", calibration, "out", config, run={"device": "cuda"})
result = gptqkit.quantize(Path("model"), ["a text"], Path("out"), {"bits": 4}, run=gptqkit.Run(shard_size="8GiB"))
print(result.report.modules[0].error, result.report.to_dict()["modules"][0], result.path / "config.json", result.url)

model, tokenizer = gptqkit.load(result.path, dtype=torch.bfloat16)
print(tokenizer.decode(model.generate(**tokenizer("text", return_tensors="pt"), max_new_tokens=30)[0]))
scores = gptqkit.evaluate("out", "text.txt", {"max_windows": 8}, reference="org/model")
print(f"{scores.perplexity:.2f}", scores.kl_divergence, scores.to_dict())
scores = gptqkit.evaluate(model, "text.txt", gptqkit.Evaluation(dtype=torch.bfloat16), tokenizer=tokenizer)

gptqkit.convert("out", "out-awq", format="awq", shard_size="2GB")
print(gptqkit.plan("org/model", "out", config, calibration=calibration).to_dict())
print(gptqkit.recommend("org/model", "8GB", "vllm")[0].bits)
print(gptqkit.inspect("out").to_dict(), gptqkit.diff("out", "org/model"), gptqkit.doctor("out"))
checkpoint = gptqkit.open_checkpoint("out")
print({name: checkpoint.weight(name).codes.shape for name in checkpoint.layers})
