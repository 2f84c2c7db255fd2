"""One call from a model and text to a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from .architecture import without_bars
from .calibration.batches import out_of_memory
from .calibration.config import Calibration, calibration_of
from .calibration.halves import vocabulary
from .calibration.samples import Samples, load_samples, load_text
from .distributed import Processes, join
from .errors import (
    ArchitectureError,
    CalibrationError,
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    GptqkitError,
    OutputExistsError,
)
from .evaluating import check_length, check_text_to_text, default_length, evaluate, is_encoder
from .evaluation.config import Evaluation
from .evaluation.perplexity import cut_windows
from .export.card import HEAT_MAP, write_card
from .export.checkpoint import REPORT, public_name, write_report
from .export.convert import check_apart
from .export.formats import find_format
from .export.inspect import inspect
from .export.shards import read_json, some
from .export.staging import check_target
from .hub import at_home, push
from .identity import check_agreement, differences, identity_of
from .job import Job, remove_ended, work_path
from .loading import choose_device, open_tokenizer
from .memory import estimate
from .model import FloatModel
from .modes import in_plain_modes
from .page import report_svg
from .pipeline import Pipeline
from .progress import ProgressCallback, silent
from .quantizer.config import QuantizeConfig
from .quantizer.methods import needs_calibration
from .report import QuantizationReport
from .run import PLACES, Run
from .sensitivity import with_chosen_before, with_chosen_bits
from .settings import settings_of
from .units import size_text
from .walking import FloatWalk

_LOG = logging.getLogger("gptqkit")


@dataclass(frozen=True, eq=False)
class QuantizeResult:
    """What `quantize` made.

    Attributes:
        report: Settings, and per module the error, the error of plain rounding, damping and time.
        path: The checkpoint.
        url: Where on the Hub it is; None where it was not uploaded.
        was_finished: Whether the job, resumed, was finished before: then nothing was done, but to upload it if asked.
    """

    report: QuantizationReport
    path: Path
    url: str | None = None
    was_finished: bool = False


@in_plain_modes
def quantize(
    model: str | Path | PreTrainedModel,
    calibration: Any,
    out: str | Path,
    config: QuantizeConfig | Mapping[str, Any] | None = None,
    *,
    run: Run | Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    evaluate_on: Any = None,
    progress: ProgressCallback = silent,
) -> QuantizeResult:
    """Quantize a language model, an encoder or an encoder-decoder, and write the checkpoint.

    Both stacks of an encoder-decoder are quantized: the first half of each calibration sample goes to its encoder, and
    its decoder goes on with the second, given what the quantized encoder makes of the first.

    A model in a folder or on the Hub is never in memory as a whole: the weights of each block are read when its turn
    comes. Finished blocks are kept in a work directory, `.NAME.gptqkit-work` beside `out`, from which an interrupted
    job can be resumed; what is finished already is left as it is then, and its report returned. Every block is read
    back and run on its packed layers before it counts. Under `torchrun`, processes that make the same call share the
    work; rank 0 writes and reports progress, and all get the result.

    Args:
        model: Hub id or folder of a float model, or a loaded one, which goes through a temporary folder.
        calibration: A `Calibration`, a dictionary of its fields, or a source as in its `source`, with the defaults;
            None where the method needs no calibration, which then reports no errors.
        out: Folder for the checkpoint.
        config: All settings of the quantization, as `QuantizeConfig` or a dictionary of its fields; None for the
            defaults.
        run: Where and how it is run, likewise.
        tokenizer: For a loaded model, or instead of the one beside the model: a tokenizer, or the folder or Hub id of
            one.
        evaluate_on: A text or data set: measure the finished checkpoint's perplexity and record it. Not for encoders,
            which have none.
        progress: Called once per module, per step of learning and tuning, and while evaluating.

    Returns:
        The report and the path.

    Raises:
        DoesNotFitError: There is too little memory or disk, as estimated or in fact; the message names what would help.
        UploadError: The checkpoint is complete, but the Hub did not take it.
        GptqkitError: Settings, text, model or files that do not fit; see `errors`.
    """
    config, run = settings_of(QuantizeConfig, config or {}), settings_of(Run, run or {})
    out = Path(at_home(out)).absolute()
    calibration = _calibration(calibration, config)
    _check_call(model, run, progress)
    with join(choose_device(run.device)) as processes, on_disk(model) as (path, name):
        with processes.together():
            source = FloatModel(path, trust_remote_code=run.trust_remote_code, revision=run.revision)
            asked = _asked(calibration)
            done = _finished(out, config, source, asked, run, evaluate_on) if processes.rank == 0 else None
        if (done := processes.gather(done)[0]) is not None:
            return QuantizeResult(done, out, _pushed(out, run, processes), was_finished=True)
        with processes.together():
            check_apart(source.path, out)
            if not (run.resume and work_path(out).exists()):
                check_target(out, overwrite=run.overwrite)
            tokenizer = open_tokenizer(tokenizer, source.path, trust_remote_code=run.trust_remote_code)
            find_format(config.format).accept(source.model.config.to_dict(), tokenizer, source.tensor_names)
            samples = None if calibration is None else drawn_samples(source, calibration, tokenizer)
            length = default_length(source.model) if samples is None else samples.input_ids.shape[1]
            text = None if evaluate_on is None else _text(source, evaluate_on, tokenizer, length)
            _check_predicts(source, config)
        run = _planned(source, config, samples, run, processes, work_path(out))
        identity = identity_of(source, config, samples, run.batch_size, processes.device)
        check_agreement(processes, identity)
        with Job(out, identity, processes, resume=run.resume, overwrite=run.overwrite) as job:
            job.check_shared()
            run = replace(run, batch_size=job.batch_size)
            with explained_memory():
                if config.chooses_bits and samples is not None:
                    walk = FloatWalk(source, samples, processes, run, out)
                    config = job.chosen() or job.choose(with_chosen_bits(walk, config, progress))
                pipeline = Pipeline(source, samples, config, job, processes, run=run, progress=progress)
                pipeline.run()
                report = pipeline.report(name, asked)
                staged, tuning = pipeline.complete(tokenizer)
                report = replace(report, tuning=tuning)
            with processes.together():
                if processes.rank == 0:
                    if text is not None:
                        where, code = str(processes.device), run.trust_remote_code
                        how = Evaluation(sequence_length=length, device=where, trust_remote_code=code)
                        scores = evaluate(staged, text, how, progress=progress).to_dict()
                        report = replace(report, perplexity=[{"dataset": public_name(evaluate_on), **scores}])
                    _describe(staged, report, source)
                    job.publish(staged)
        return QuantizeResult(processes.gather(report)[0], out, _pushed(out, run, processes))


def _check_call(model: Any, run: Run, progress: Any) -> None:
    """Refuse what is no model or no callback, and a revision of a loaded model."""
    if not callable(progress) or isinstance(progress, type):
        raise ConfigError(f"progress is {progress!r}; give a function, or ProgressDisplay()")
    if not isinstance(model, (str, Path, PreTrainedModel)):
        raise ArchitectureError(f"model is a {type(model).__name__}; give a folder, an id, or a PreTrainedModel")
    if isinstance(model, PreTrainedModel) and run.revision is not None:
        raise ConfigError(f"revision is {run.revision!r}, but the model is loaded already; leave it out")


def _describe(checkpoint: Path, report: QuantizationReport, source: FloatModel) -> None:
    """Write report, heat map and model card; say so where the checkpoint became larger than it should."""
    write_report(checkpoint, report.to_dict())
    if any(row.layer is not None and row.error is not None for row in report.modules):
        (checkpoint / HEAT_MAP).write_text(report_svg(checkpoint), encoding="utf-8")
    write_card(checkpoint, source.path)
    limit = report.config.target_size
    if limit is not None:
        summary = inspect(checkpoint)
        size = summary.packed_bytes + summary.other_bytes
        if size > int(limit):  # what no forward pass calls stays as it is, and so do tensors that no module has
            _LOG.warning(
                "the checkpoint's tensors take %s, and target_size is %s: some are copied that the choice of bits does "
                "not count; ask for as much less",
                size_text(size),
                size_text(int(limit)),
            )


def _pushed(out: Path, run: Run, processes: Processes) -> str | None:
    """Upload the finished checkpoint where that is wanted, and return its address."""
    if run.push_to_hub is None:
        return None
    with processes.together():
        url = push(out, run.push_to_hub, private=run.private) if processes.rank == 0 else ""
    return processes.gather(url)[0]


def _calibration(given: Any, config: QuantizeConfig) -> Calibration | None:
    if given is None and (who := needs_calibration(config)):
        raise CalibrationError(f"{who} needs calibration text; give some (only method 'rtn' by itself does without)")
    return None if given is None else calibration_of(given)


def _asked(calibration: Calibration | None) -> dict[str, Any]:
    """Return the settings that are no defaults, and the source by name: what is known without reading its text."""
    if calibration is None:
        return {}
    usual = vars(Calibration(None))
    now = {**vars(calibration), "source": public_name(calibration.source)}  # arrays are not compared
    return {name: value for name, value in now.items() if value != usual[name] or name == "source"}


@contextmanager
def explained_memory() -> Iterator[None]:
    """Say what helps where memory runs out and smaller batches do not help."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, GptqkitError) or not out_of_memory(error):  # another process says so itself
            raise
        raise DoesNotFitError(
            f"out of memory ({str(error).splitlines()[0]}); use --activations disk (activations='disk') or "
            "--batch-size 1, also to resume; or, anew, --quality fast, or fewer or shorter samples"
        ) from error


def _check_predicts(source: FloatModel, config: QuantizeConfig) -> None:
    """Refuse to tune the scales of a model that has no predictions to compare."""
    if config.tune_epochs and is_encoder(source.model, source.path):
        raise ConfigError(
            f"{type(source.model).__name__}, an encoder, predicts no tokens to tune scales on; use tune_epochs=0 "
            "(--tune-epochs 0)"
        )


def _finished(
    out: Path, config: QuantizeConfig, source: FloatModel, asked: Mapping[str, Any], run: Run, text: Any
) -> QuantizationReport | None:
    """Return the report of a finished checkpoint of the same model and settings; None where there is none to resume.

    It is not measured any more: where it was not on `text`, a warning says so.
    """
    if not run.resume:
        return None
    remove_ended(out)
    if work_path(out).exists() or not (out / REPORT).exists():
        return None
    try:
        report = QuantizationReport.from_dict(read_json(out / REPORT))
    except CheckpointError:
        if run.overwrite:
            return None
        raise
    if config.chooses_bits:
        config = with_chosen_before(config, report.config)
    usual = vars(Calibration(None))
    before = {"model": report.digests, "calibration": usual | report.calibration, "config": report.config.to_dict()}
    now = {"model": source.identity(), "calibration": usual | dict(asked), "config": config.to_dict()}
    different = differences(before, now)
    if different and run.overwrite:
        return None
    if different:
        raise OutputExistsError(
            f"{out} holds the finished result of another job: {some(different)}; choose another directory, or "
            "overwrite it (overwrite=True, --overwrite)"
        )
    _LOG.info("%s was finished before; there is nothing to resume", out)
    if text is not None and public_name(text) not in [row.get("dataset") for row in report.perplexity]:
        _LOG.warning("%s is not measured on %s, being finished; use gptqkit evaluate", out, public_name(text))
    return report


@contextmanager
def on_disk(model: str | Path | PreTrainedModel) -> Iterator[tuple[str | Path, str]]:
    """Give the path or id of a model, and its name; a loaded model is saved for as long as the context lasts."""
    if not isinstance(model, PreTrainedModel):
        yield model, public_name(model)
        return
    name = public_name(model.name_or_path) if model.name_or_path else type(model).__name__
    with TemporaryDirectory(prefix="gptqkit-") as folder:
        before = dict(vars(model.config))
        try:
            model.should_save_on_this_rank = lambda *_: True  # every process has a folder of its own
            with without_bars():
                model.save_pretrained(folder)
        except SafetensorError as error:
            raise OSError(f"{folder} does not take the model ({error}); set TMPDIR to a folder with room") from error
        except RuntimeError as error:  # weights on the meta device, or shared where their class does not know of it
            raise ArchitectureError(f"transformers cannot save the loaded {type(model).__name__}: {error}") from error
        finally:
            del model.should_save_on_this_rank
            vars(model.config).update(before)  # transformers writes dtype and class into it
        try:
            yield folder, name
        except CheckpointError as error:
            if folder not in str(error):
                raise
            raise ArchitectureError(
                f"what transformers saves of the loaded {type(model).__name__} "
                f"{str(error).split(';')[0].removeprefix(folder).strip()}; give a plain float model, with adapters "
                "merged, pruning made permanent, and a config that describes it"
            ) from error


def drawn_samples(source: FloatModel, calibration: Calibration, tokenizer: Any) -> Samples:
    """Draw the samples; ready ones have their own length, unless another is asked for."""
    length = calibration.sequence_length or default_length(source.model)
    check_length(source.model, length)
    samples = load_samples(calibration, tokenizer, sequence_length=length, vocab_size=vocabulary(source.model))
    check_length(source.model, samples.input_ids.shape[1])
    return samples


def _text(source: FloatModel, dataset: Any, tokenizer: Any, length: int) -> Tensor:
    """Read the text to evaluate on at once, so that nothing is found wrong with it when the work is done."""
    check_text_to_text(source.model)
    if is_encoder(source.model, source.path):
        raise ConfigError(
            f"evaluate_on measures perplexity, which {type(source.model).__name__}, an encoder, does not have; leave "
            "it out, and compare embeddings when it is done: gptqkit evaluate OUT --dataset TEXT --reference MODEL"
        )
    text = load_text(dataset, tokenizer, vocab_size=vocabulary(source.model))
    cut_windows(text, length)
    return text


def _planned(
    source: FloatModel, config: QuantizeConfig, samples: Samples | None, run: Run, processes: Processes, folder: Path
) -> Run:
    """Return `run` with the place of hidden states chosen, the same in all processes; refuse what cannot run."""
    shape = None if samples is None else samples.input_ids.shape
    needed = estimate(source.empty, config, shape, run, processes.device, folder, processes=processes.size)
    with processes.together():
        if processes.rank == 0 and not (run.resume and any(folder.glob("block-*.json"))):
            needed.check()
    places = processes.gather(needed.activations)
    slowest = max(places, key=PLACES.index)
    return replace(run, activations=slowest)
