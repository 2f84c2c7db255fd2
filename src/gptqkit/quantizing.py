"""One call from a model and text to a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from .calibration.sources import Source
from .calibration.windows import load_tokens, load_windows
from .errors import ArchitectureError, CalibrationError
from .evaluating import check_length, default_length, evaluate
from .evaluation.perplexity import cut_windows
from .export.staging import check_target
from .export.writer import public_name, write_checkpoint
from .loading import choose_device, load_float
from .progress import ProgressCallback, silent
from .quantizer.config import QuantizeConfig
from .quantizer.quantized import QuantizedWeight
from .quantizer.report import QuantizationReport
from .quantizer.walk import quantize_blocks
from .version import __version__


@dataclass(frozen=True, eq=False)
class QuantizeResult:
    """What `quantize` made.

    Attributes:
        report: Settings, and per module the error, the error of plain rounding, damping and time.
        weights: The quantized weight of every module, by full name.
        path: The checkpoint, where one was written.
    """

    report: QuantizationReport
    weights: dict[str, QuantizedWeight]
    path: Path | None


def quantize(
    model: str | Path | PreTrainedModel,
    calibration: Source | None = None,
    out: str | Path | None = None,
    config: QuantizeConfig | None = None,
    *,
    tokenizer: Any = None,
    samples: int = 128,
    sequence_length: int | None = None,
    seed: int = 0,
    batch_size: int = 8,
    device: str | torch.device = "auto",
    column: str | None = None,
    split: str | None = None,
    concatenate: bool = True,
    evaluate_on: str | Path | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: ProgressCallback = silent,
) -> QuantizeResult:
    """Quantize a causal language model and write the checkpoint.

    Args:
        model: Hub id or folder of a float model, or a loaded one (left as it was).
        calibration: Text, tokens or a data set, in any form that `load_windows` takes; method "rtn" works without.
        out: Folder for the checkpoint; None keeps the result in memory.
        config: All settings of the quantization; None for the defaults.
        tokenizer: For a loaded model; otherwise found beside the model.
        samples: Calibration windows.
        sequence_length: Tokens per window; None for 2048 or the model's maximum, whichever is less.
        seed: Chooses the windows.
        batch_size: Windows per forward pass. Another size sums in another order, so codes may differ as with threads.
        device: "auto" takes a GPU where there is one.
        column: Column of the data set to read.
        split: Split of the data set to read.
        concatenate: Join all text and cut it; False makes one padded window per row.
        evaluate_on: Text file or data set: measure the finished checkpoint's perplexity and record it.
        overwrite: Replace `out` where it is a quantized model already.
        trust_remote_code: Let transformers run code that comes with the float model.
        progress: Called once per module, and while evaluating.

    Returns:
        The report, the weights in memory, and the path.

    Raises:
        GptqkitError: Settings, text, model or files that do not fit; see `errors`.
    """
    config = config or QuantizeConfig()
    if not isinstance(model, (str, Path, PreTrainedModel)):
        raise ArchitectureError(f"model is a {type(model).__name__}; give a folder, an id, or a PreTrainedModel")
    if out is not None:
        check_target(Path(out), overwrite=overwrite)
    if calibration is None and config.method != "rtn":
        raise CalibrationError(f"method {config.method!r} needs calibration text; only 'rtn' works without")
    if evaluate_on is not None and out is None:
        raise CalibrationError("evaluate_on measures the written checkpoint; give `out` as well")
    start = time.perf_counter()
    place = choose_device(device)
    if isinstance(model, PreTrainedModel):
        name = public_name(model.name_or_path) if model.name_or_path else type(model).__name__
        loaded = model
    else:
        name = public_name(model)
        loaded, own_tokenizer = load_float(model, device="cpu", dtype="stored", trust_remote_code=trust_remote_code)
        tokenizer = own_tokenizer if tokenizer is None else tokenizer
    length = default_length(loaded) if sequence_length is None else sequence_length
    check_length(loaded, length)
    vocab_size = loaded.get_input_embeddings().weight.shape[0]
    text = None
    if evaluate_on is not None:  # read now, so that nothing is found wrong with it when the work is done
        text = load_tokens(evaluate_on, tokenizer, vocab_size=vocab_size)
        cut_windows(text, length)
    windows = None
    if calibration is not None:
        windows = load_windows(
            calibration,
            tokenizer,
            samples=samples,
            sequence_length=length,
            seed=seed,
            column=column,
            split=split,
            concatenate=concatenate,
            vocab_size=vocab_size,
        )
    training = loaded.training
    loaded.eval()
    try:
        walked = quantize_blocks(loaded, windows, config, device=place, batch_size=batch_size, progress=progress)
    finally:
        loaded.train(training)
    report = QuantizationReport(
        model=name,
        config=config,
        samples=0 if windows is None else len(windows.input_ids),
        sequence_length=length,
        seed=seed,
        tokens=walked.tokens,
        excluded_samples=walked.excluded_samples,
        block_weights=walked.block_weights,
        quantized_weights=walked.quantized_weights,
        device=place.type,
        seconds=time.perf_counter() - start,
        versions=_versions(),
        modules=walked.reports,
    )
    if out is None:
        return QuantizeResult(report, walked.weights, None)

    def measure(staged: Path) -> Mapping[str, Any]:
        nonlocal report
        if evaluate_on is not None:
            scores = evaluate(staged, text, sequence_length=length, device=device, progress=progress)
            row = {"dataset": public_name(evaluate_on), **scores.to_dict()}
            report = dataclasses.replace(report, perplexity=[row])
        return {"perplexity": report.perplexity}

    write_checkpoint(
        Path(out),
        config=config,
        weights=walked.weights,
        other_tensors=other_tensors(loaded, walked.weights),
        model_config=json.loads(loaded.config.to_json_string()),
        report=report.to_dict(),
        tokenizer=tokenizer,
        generation_config=json.loads(loaded.generation_config.to_json_string()) if loaded.can_generate() else None,
        overwrite=overwrite,
        finish=measure,
    )
    return QuantizeResult(report, walked.weights, Path(out))


def other_tensors(model: nn.Module, weights: Mapping[str, QuantizedWeight]) -> dict[str, Tensor]:
    """Everything that stays in floating point, by name: no weight of a quantized module, and tied tensors only once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or name.removesuffix(".weight") in weights:
            continue
        seen.add(id(tensor))
        tensors[name] = tensor.detach()
    return tensors


def _versions() -> dict[str, str]:
    return {"gptqkit": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
