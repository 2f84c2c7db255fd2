"""One call from a model and text to a checkpoint."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from .calibration.activations import Place
from .calibration.batches import out_of_memory
from .calibration.sources import Source
from .calibration.windows import TokenWindows, load_tokens, load_windows
from .errors import ArchitectureError, CalibrationError, ConfigError, DoesNotFitError
from .evaluating import check_length, default_length, evaluate, is_encoder
from .evaluation.perplexity import cut_windows
from .export.staging import check_target
from .export.work import work_path
from .export.writer import MAX_SHARD_BYTES, public_name
from .job import Job, StoredWeights, check_agreement, versions
from .loading import choose_device, load_tokenizer
from .planning import plan_run
from .progress import ProgressCallback, silent
from .quantizer.config import QuantizeConfig
from .quantizer.quantized import QuantizedWeight
from .quantizer.ranks import Ranks
from .quantizer.report import QuantizationReport
from .quantizer.solving import WalkResult
from .quantizer.walk import quantize_blocks
from .source import FloatModel, LoadedModel, StoredModel
from .workload import Workload


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
    batch_size: int | None = None,
    device: str | torch.device = "auto",
    column: str | None = None,
    split: str | None = None,
    concatenate: bool = True,
    evaluate_on: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = False,
    activations: Literal["auto"] | Place = "auto",
    activation_memory: int | None = None,
    fit_check: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    trust_remote_code: bool = False,
    progress: ProgressCallback = silent,
) -> QuantizeResult:
    """Quantize a language model or an encoder and write the checkpoint.

    A model in a folder or on the Hub is never in memory as a whole: the weights of each block are read when its turn
    comes. Finished blocks are kept in a work directory, `.NAME.gptqkit-work` beside `out`, from which an interrupted
    job can be resumed. Under `torchrun`, processes that make the same call share the work; rank 0 writes and reports
    progress, and all get the result.

    Args:
        model: Hub id or folder of a float model, or a loaded one (left as it was).
        calibration: Text, tokens or a data set, in any form that `load_windows` takes; method "rtn" works without.
        out: Folder for the checkpoint; None keeps the result in memory.
        config: All settings of the quantization; None for the defaults.
        tokenizer: For a loaded model; otherwise found beside the model.
        samples: Calibration windows.
        sequence_length: Tokens per window; None for 2048 or the model's maximum, whichever is less.
        seed: Chooses the windows.
        batch_size: Windows per forward pass; None for as many as fit, 8 at most. Another size sums in another order, so
            codes may differ as with threads.
        device: "auto" takes a GPU where there is one.
        column: Column of the data set to read.
        split: Split of the data set to read.
        concatenate: Join all text and cut it; False makes one padded window per row.
        evaluate_on: Text file or data set: measure the finished checkpoint's perplexity and record it. Not for
            encoders, which have none.
        overwrite: Replace `out` where it is a quantized model already.
        resume: Go on with the unfinished job for `out` where there is one. The result is the same to the bit as without
            the interruption, in the same environment.
        activations: Where hidden states are kept between blocks: "device", "memory" (RAM) or "disk"; "auto" for the
            first of these where they fit.
        activation_memory: Bytes of RAM that "auto" may give to hidden states; None for half of what is free.
        fit_check: Refuse a run that does not fit by its plan; False only warns, and goes on with the most modest of the
            open choices.
        max_shard_bytes: Size of the checkpoint's files, at most.
        trust_remote_code: Let transformers run code that comes with the float model.
        progress: Called once per module, and while evaluating.

    Returns:
        The report, the weights, and the path.

    Raises:
        DoesNotFitError: There is too little memory or disk, by the plan or in fact; the message names what would help.
        GptqkitError: Settings, text, model or files that do not fit; see `errors`.
    """
    config = config or QuantizeConfig()
    if not isinstance(model, (str, Path, PreTrainedModel)):
        raise ArchitectureError(f"model is a {type(model).__name__}; give a folder, an id, or a PreTrainedModel")
    if out is None and (resume or activations == "disk"):
        raise ConfigError("resume and activations on disk need a folder to work beside; give `out` as well")
    if calibration is None and config.method != "rtn":
        raise CalibrationError(f"method {config.method!r} needs calibration text; only 'rtn' works without")
    if evaluate_on is not None and out is None:
        raise CalibrationError("evaluate_on measures the written checkpoint; give `out` as well")
    start = time.perf_counter()
    source: FloatModel
    with Ranks.join(choose_device(device)) as ranks:
        with ranks.together():
            if out is not None and not (resume and work_path(Path(out)).exists()):
                check_target(Path(out), overwrite=overwrite)
            if isinstance(model, PreTrainedModel):
                name = public_name(model.name_or_path) if model.name_or_path else type(model).__name__
                source = LoadedModel(model)
            else:
                name = public_name(model)
                source = StoredModel(model, trust_remote_code=trust_remote_code)
                tokenizer = (
                    load_tokenizer(source.path, trust_remote_code=trust_remote_code) if tokenizer is None else tokenizer
                )
            folder = source.path if isinstance(source, StoredModel) else None
            if evaluate_on is not None and is_encoder(source.model, folder):
                raise ConfigError(
                    f"evaluate_on measures perplexity, which {type(source.model).__name__}, an encoder, has not; leave "
                    "it out, and compare embeddings when it is done: "
                    "gptqkit evaluate OUT --dataset TEXT --reference MODEL"
                )
            length = default_length(source.model) if sequence_length is None else sequence_length
            check_length(source.model, length)
            vocab_size = source.model.get_input_embeddings().weight.shape[0]
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
        check_agreement(ranks, source, config, windows, batch_size, out)
        job = None
        if out is not None:
            job = Job(Path(out), source, config, windows, batch_size, ranks, resume=resume, overwrite=overwrite)
        with job or nullcontext():
            asked = Workload(
                config=config,
                sequence_length=length if windows is None else windows.input_ids.shape[1],
                device=ranks.device,
                samples=0 if windows is None else len(windows.input_ids),
                batch_size=batch_size,
                activations=activations,
                activation_memory=activation_memory,
                writes=job is not None,
                evaluate_on=evaluate_on,
            )
            workload = _planned(source, asked, ranks, job, fit_check=fit_check)
            walked = _walk(source, windows, config, ranks, workload, job, progress)
            report = QuantizationReport(
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
                device=ranks.device.type,
                seconds=time.perf_counter() - start if job is None else job.seconds,
                versions=versions(),
                modules=walked.reports,
            )
            if job is None:
                return QuantizeResult(report, walked.weights, None)

            def measure(staged: Path) -> Mapping[str, Any]:
                nonlocal report
                if evaluate_on is not None:
                    scores = evaluate(staged, text, sequence_length=length, device=ranks.device, progress=progress)
                    row = {"dataset": public_name(evaluate_on), **scores.to_dict()}
                    report = dataclasses.replace(report, perplexity=[row])
                return {"perplexity": report.perplexity}

            if ranks.rank == 0:
                job.finish(report.to_dict(), tokenizer, max_shard_bytes=max_shard_bytes, measure=measure)
            report = ranks.gather(report)[0]
    return QuantizeResult(report, StoredWeights(job.out), job.out)


def _planned(source: FloatModel, asked: Workload, ranks: Ranks, job: Job | None, *, fit_check: bool) -> Workload:
    """`asked` with its open choices made: those of a job that goes on stay, as far as they show in the result."""
    taken = 0
    if job is not None:
        resumed = job.resumed()
        if resumed is not None and asked.samples:
            asked = dataclasses.replace(asked, batch_size=resumed.batch_size, begun=True)
        taken = sum(file.stat().st_size for file in job.folder.glob("*") if file.is_file())
    out = None if job is None else job.out
    return plan_run(source.model, asked, ranks, out, already=taken, fit_check=fit_check).workload


def _walk(
    source: FloatModel,
    windows: TokenWindows | None,
    config: QuantizeConfig,
    ranks: Ranks,
    workload: Workload,
    job: Job | None,
    progress: ProgressCallback,
) -> WalkResult:
    training = source.model.training
    source.model.eval()
    try:
        return quantize_blocks(
            source.model,
            windows,
            config,
            device=ranks.device,
            batch_size=workload.batch_size or 1,
            weights=source.weights,
            journal=job,
            activations="memory" if workload.activations == "auto" else workload.activations,
            statistics_bytes=workload.statistics_bytes,
            ranks=ranks,
            progress=progress,
        )
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"memory ran out, other than planned, which halving batches does not mend: {str(error).splitlines()[0]}. "
            "Give it less to hold (activations='disk', fewer or shorter samples), or free what other programs hold"
        ) from error
    finally:
        source.model.train(training)
