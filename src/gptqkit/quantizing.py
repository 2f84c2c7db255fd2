"""One call from a model and text to a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from .calibration.activations import Place
from .calibration.sources import Source
from .calibration.windows import load_tokens, load_windows
from .errors import ArchitectureError, CalibrationError, ConfigError
from .evaluating import check_length, default_length, evaluate
from .evaluation.perplexity import cut_windows
from .export.staging import check_target
from .export.work import WorkDirectory, work_path
from .export.writer import MAX_SHARD_BYTES, finish_checkpoint, public_name
from .job import Job, StoredWeights, identity
from .loading import choose_device, load_tokenizer
from .progress import ProgressCallback, silent
from .quantizer.config import QuantizeConfig
from .quantizer.quantized import QuantizedWeight
from .quantizer.report import QuantizationReport
from .quantizer.walk import WalkResult, quantize_blocks
from .source import FloatModel, LoadedModel, StoredModel
from .version import __version__

_LOG = logging.getLogger("gptqkit")


@dataclass(frozen=True, eq=False)
class QuantizeResult:
    """What `quantize` made.

    Attributes:
        report: Settings, and per module the error, the error of plain rounding, damping and time.
        weights: The quantized weight of every module, by full name; of a checkpoint, read when it is asked for.
        path: The checkpoint, where one was written.
    """

    report: QuantizationReport
    weights: Mapping[str, QuantizedWeight]
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
    resume: bool = False,
    activations: Place = "memory",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    trust_remote_code: bool = False,
    progress: ProgressCallback = silent,
) -> QuantizeResult:
    """Quantize a causal language model and write the checkpoint.

    A model in a folder or on the Hub is never in memory as a whole: the weights of each block are read when its turn
    comes. Finished blocks are kept in a work directory, `.NAME.gptqkit-work` beside `out`, from which an interrupted
    job can be resumed.

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
        resume: Go on with the unfinished job for `out` where there is one. The result is the same to the bit as without
            the interruption, in the same environment.
        activations: Where hidden states are kept between blocks: "device", "memory" (RAM) or "disk".
        max_shard_bytes: Size of the checkpoint's files, at most.
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
    if out is None and (resume or activations == "disk"):
        raise ConfigError("resume and activations on disk need a folder to work beside; give `out` as well")
    if out is not None and not (resume and work_path(Path(out)).exists()):
        check_target(Path(out), overwrite=overwrite)
    if calibration is None and config.method != "rtn":
        raise CalibrationError(f"method {config.method!r} needs calibration text; only 'rtn' works without")
    if evaluate_on is not None and out is None:
        raise CalibrationError("evaluate_on measures the written checkpoint; give `out` as well")
    start = time.perf_counter()
    place = choose_device(device)
    source: FloatModel
    if isinstance(model, PreTrainedModel):
        name = public_name(model.name_or_path) if model.name_or_path else type(model).__name__
        source = LoadedModel(model)
    else:
        name = public_name(model)
        source = StoredModel(model, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(source.path, trust_remote_code=trust_remote_code) if tokenizer is None else tokenizer
    opened = source.model
    length = default_length(opened) if sequence_length is None else sequence_length
    check_length(opened, length)
    vocab_size = opened.get_input_embeddings().weight.shape[0]
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

    def walk(journal: Job | None) -> WalkResult:
        training = opened.training
        opened.eval()
        try:
            return quantize_blocks(
                opened,
                windows,
                config,
                device=place,
                batch_size=batch_size,
                weights=source.weights,
                journal=journal,
                activations=activations,
                progress=progress,
            )
        finally:
            opened.train(training)

    def report_on(walked: WalkResult, seconds: float) -> QuantizationReport:
        return QuantizationReport(
            model=name,
            config=config,
            samples=0 if windows is None else len(windows.input_ids),
            sequence_length=length,
            seed=seed,
            tokens=walked.tokens,
            excluded_samples=walked.excluded_samples,
            batch_size=walked.batch_size,
            block_weights=walked.block_weights,
            quantized_weights=walked.quantized_weights,
            device=place.type,
            seconds=seconds,
            versions=_versions(),
            modules=walked.reports,
        )

    if out is None:
        walked = walk(None)
        return QuantizeResult(report_on(walked, time.perf_counter() - start), walked.weights, None)

    work = WorkDirectory(
        Path(out),
        identity(source, config, windows, batch_size, place),
        resume=resume,
        overwrite=overwrite,
        environment={"threads": torch.get_num_threads(), **_versions()},
    )
    job = Job(work, source, config, 0 if windows is None else len(windows.input_ids))
    try:
        report = report_on(walk(job), job.seconds)

        def measure(staged: Path) -> Mapping[str, Any]:
            nonlocal report
            if evaluate_on is not None:
                scores = evaluate(staged, text, sequence_length=length, device=device, progress=progress)
                row = {"dataset": public_name(evaluate_on), **scores.to_dict()}
                report = dataclasses.replace(report, perplexity=[row])
            return {"perplexity": report.perplexity}

        job.keep_the_rest()
        finish_checkpoint(
            work,
            config=config,
            model_config=json.loads(opened.config.to_json_string()),
            report=report.to_dict(),
            tokenizer=tokenizer,
            generation_config=json.loads(opened.generation_config.to_json_string()) if opened.can_generate() else None,
            carried=source.carried,
            copy_files=source.copy_files,
            max_shard_bytes=max_shard_bytes,
            measure=measure,
        )
    except BaseException:
        if not work.records:
            work.discard()
        else:
            work.close()
            _LOG.warning(
                "%d finished parts are kept in %s; resume=True goes on from there", len(work.records), work.path
            )
        raise
    return QuantizeResult(report, StoredWeights(Path(out)), Path(out))


def _versions() -> dict[str, str]:
    return {"gptqkit": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
