"""vLLM reads checkpoints on the CPU: `logprobs` (windows, length - 1) float32 of every token after the first."""

from __future__ import annotations

from pathlib import Path

import torch
from reading import answer
from torch import Tensor
from vllm import LLM, SamplingParams


def read(checkpoint: Path, input_ids: Tensor, kernel: str | None) -> dict[str, Tensor]:
    if kernel is not None:
        raise ValueError("vLLM chooses its kernels itself; leave --kernel out")
    llm = LLM(
        model=str(checkpoint),
        dtype="float16",
        enforce_eager=True,
        max_model_len=input_ids.shape[1] + 8,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
    )
    prompts = [{"prompt_token_ids": row.tolist()} for row in input_ids]
    # The one token that must be generated is thrown away; each position of the prompt holds its own token's logprob.
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), use_tqdm=False)
    windows = [
        [position[token].logprob for token, position in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
        for row, output in zip(input_ids.tolist(), outputs, strict=True)
    ]
    return {"logprobs": torch.tensor(windows, dtype=torch.float32)}


if __name__ == "__main__":
    answer(read)
