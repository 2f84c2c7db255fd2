"""The layer-wise pipeline: the story of a quantization.

For every block: load its weights; for every subset of Linears that share an input: collect the moments of that input,
solve, put the solutions in place; write the block, run what was written, let it count; advance the hidden states.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .assembly import assemble, check_block, open_part, record_of, stored_module, write_part
from .calibration.samples import Samples
from .distributed import Processes
from .fisher import Fisher, Outputs, measure_fisher
from .identity import versions
from .job import Job
from .learning import learn_block
from .model import FloatModel
from .progress import Progress, ProgressCallback, silent
from .quantizer.config import QuantizeConfig
from .quantizer.methods import Solution, needs_cross, needs_drift, pairs_models
from .quantizer.quantized import QuantizedWeight
from .report import BlockReport, ModuleReport, QuantizationReport, TuningReport
from .run import Run
from .solving import Measured, Solved, solve_all
from .streams import Streams
from .targets import Target, find_head, find_targets, matrix, tell_misfits
from .tuning import tune
from .walking import own_batches

UNCALLED = "no forward pass calls it"
PROBE = Samples(torch.arange(16, device="cpu")[None])  # what blocks are run on where there is no calibration


class Pipeline:
    """One run through the blocks of a model; `job` takes every block as it is finished, and knows those that are.

    Without samples, which some methods can do without, no errors are reported. `progress` is called once per module.

    Attributes:
        left: Linears that stay in floating point because they cannot be quantized, and why.

    Raises:
        ArchitectureError, ConfigError: Modules that the settings do not fit; before any work.
    """

    def __init__(
        self,
        model: FloatModel,
        samples: Samples | None,
        config: QuantizeConfig,
        job: Job,
        processes: Processes,
        *,
        run: Run,
        progress: ProgressCallback = silent,
    ) -> None:
        self.model, self.config, self.job, self.processes, self.place = model, config, job, processes, run.activations
        # On a CPU blocks run in float32, on a GPU in the model's own dtype; solvers work in float32, or float64.
        self.device, self.dtype = processes.device, torch.float32 if processes.device.type == "cpu" else model.dtype
        self.targets, self.left = find_targets(model.model, config)
        self.head = find_head(model.model, config)
        self._tell = partial(tell_misfits, config=config, strict=run.strict, log=processes.rank == 0)
        self._told: set[str] = set()
        self._run = run
        self._fisher: Fisher | None = None
        self._tell(self.targets, self.left)
        self.calibrated = samples is not None
        needs = (pairs_models, needs_cross, needs_drift)
        self.paired, self.cross, self.drift = (self.calibrated and each(config) for each in needs)
        self.batches = own_batches(model, samples or PROBE, processes, run)
        if job.records:
            self.batches.counts[job.records[-1]["excluded"]] = False
            self.batches.size = min(self.batches.size, job.records[-1]["batch_size"])
        self._progress = progress if processes.rank == 0 else silent
        for record in job.records:
            self.left |= record["left"]
        uncalled = sum(why == UNCALLED for why in self.left.values())  # of finished blocks
        self._done, self._total = len(job.reports), sum(map(len, self.targets)) - uncalled + (self.head is not None)

    @torch.no_grad()
    def run(self) -> None:
        """Quantize every block that is not finished, and the output layer where asked.

        Raises:
            NonFiniteError: Non-finite activations, unless `skip_nonfinite`.
            SingularHessianError: A module that cannot be solved, by name.
            CheckpointError: A block that does not run as it was written.
        """
        layers, finished = len(self.model.blocks), len(self.job.records)
        if finished == layers + (self.head is not None):
            return
        if self.config.two_sided and self.calibrated and finished < layers:
            where = self._run, self.job.out, self.job.folder
            self._fisher = measure_fisher(self.model, self.batches, self.processes, *where, self._progress)
        how = {"paired": self.paired, "cross": self.cross, "drift": self.drift, "skip": self.config.skip_nonfinite}
        streams = Streams(self.model, self.batches, self.processes, **how)
        with self.model.outside(self.device, self.dtype):
            for layer in range(streams.begin(self.job.folder, self.job.states, self.dtype, self.place), layers):
                streams.enter(layer)
                with streams.block(layer):
                    self._quantize_block(layer, streams, finished=layer < finished)
            self._fisher = None  # gradients behind all blocks are not in memory beside tuning
            if self.head is not None:
                with streams.head():
                    measured = streams.collect_head(self.head) if self.calibrated else Measured([self.head])
                    solved, reports = self._solve([measured], None)
                    weights = {name: solution.weight for name, solution in solved.items()}
                    self._commit(None, weights, reports, streams, None)

    def complete(self, tokenizer: Any) -> tuple[Path, TuningReport | None]:
        """Make the checkpoint of all finished blocks, and tune its scales where asked; return its directory."""
        with self.processes.together():
            if self.processes.rank == 0:
                job, shard = self.job, int(self._run.shard_size)
                assemble(job.folder, job.records, self.model, self.config, tokenizer, shard)
        directory, epochs = self.job.folder / "checkpoint", self.config.tune_epochs
        if not epochs:
            return directory, None
        how: dict[str, Any] = {"epochs": epochs, "dtype": self.dtype, "progress": self._progress}
        return directory, tune(directory, self.model, self.batches, self.processes, **how)

    def report(self, name: str, calibration: Mapping[str, Any]) -> QuantizationReport:
        """Return the report on the whole, with the name of the model and what it was calibrated on."""
        modules, samples = self.job.reports, self.batches.samples
        return QuantizationReport(
            model=name,
            digests=self.model.identity(),
            config=self.config,
            samples=len(samples.input_ids) * self.calibrated,
            sequence_length=samples.input_ids.shape[1] * self.calibrated,
            seed=calibration.get("seed", 0),
            calibration=dict(calibration),
            tokens=self.batches.tokens * self.calibrated,
            excluded_samples=int((~self.batches.counts).sum()),
            batch_size=self.batches.size,
            block_weights=sum(tensor.numel() for tensor in self.model.blocks.parameters() if tensor.dim() >= 2),
            quantized_weights=sum(each.shape[0] * each.shape[1] for each in modules if each.layer is not None),
            device=self.device.type,
            seconds=self.job.seconds,
            versions=versions(),
            left_in_float=self.left,
            modules=modules,
            blocks=[BlockReport(**record["learned"]) for record in self.job.records if record["learned"]],
        )

    def _quantize_block(self, layer: int, streams: Streams, *, finished: bool) -> None:
        """Solve one block, unless that is done, and let the hidden states through it."""
        block, targets = self.model.blocks[layer], self.targets[layer]
        twin = copy.deepcopy(block) if self.paired and targets else None  # it keeps the float weights
        if finished:
            part = open_part(self.job.folder, self.job.records[layer], self.config)
            stored = {each.name: stored_module(self.model, each.name) for each in targets}
            self._install({name: part.weight(place) for name, place in stored.items() if place in part.layers})
        else:
            found, reports = self._solve_block(layer, streams, twin)
        last = layer + 1 == len(self.model.blocks) and self.head is None
        learns = not finished and twin is not None and self.config.learn_iterations > 0
        if self.paired and (learns or not last):
            streams.advance("float", layer, block if twin is None else twin)
        if not finished:
            solved = {name: solution.weight for name, solution in found.items()}
            learned = self._learn(layer, found, solved, streams) if learns and found else None
            self._commit(layer, solved, reports, streams, learned)
        if not last:
            streams.advance("hidden", layer, block)
            self.job.save_states(layer + 1, streams.states)

    def _solve_block(
        self, layer: int, streams: Streams, twin: nn.Module | None
    ) -> tuple[dict[str, Solution], list[ModuleReport]]:
        """Solve the Linears of a block in the order in which it calls them, and put the solutions in place.

        With `true_sequential` every group of Linears sees the outputs of the quantized ones before it; without it no
        pass sees any quantized Linear of the block.
        """
        if not self.calibrated:
            solved, reports = self._solve([Measured([target]) for target in self.targets[layer]], layer)
            self._install({name: solution.weight for name, solution in solved.items()})
            return solved, reports
        solved, reports = {}, []
        groups = streams.trace(layer, self.targets[layer])
        called = [target for group in groups for subset in group.subsets for target in subset]
        silent = [target for target in self.targets[layer] if target not in called]
        self.left |= dict.fromkeys((target.name for target in silent), UNCALLED)
        self._total -= len(silent)
        why = f"{UNCALLED}; others of this name in later blocks are not listed"
        fresh = {target.name: why for target in silent if target.inner not in self._told}
        self._told |= {target.inner for target in silent}  # told of one block, not of all
        self._tell([], fresh)
        fisher = self._fisher_of(layer)
        outputs = None if fisher is None else Outputs(streams, layer, called, fisher)
        for together in [[group] for group in groups] if self.config.true_sequential else [groups]:
            now: dict[str, Solution] = {}
            for measured in streams.collect(layer, together, twin):
                found, rows = self._solve(measured, layer, outputs)
                now |= found
                reports += rows
            self._install({name: solution.weight for name, solution in now.items()})
            solved |= now
        return solved, reports

    def _fisher_of(self, layer: int) -> Fisher | None:
        return self._fisher if layer in self.model.stacks[-1] else None

    def _solve(
        self, measured: Sequence[Measured], layer: int | None, outputs: Outputs | None = None
    ) -> tuple[dict[str, Solution], list[ModuleReport]]:
        """Solve Linears, and report on them as they are done."""
        solved: dict[str, Solution] = {}
        reports: list[ModuleReport] = []
        outputs_of = None if outputs is None else outputs.of
        for one, target, found in solve_all(measured, self._matrix, self.processes, outputs_of):
            solved[target.name] = found.solution
            reports.append(self._report(layer, one, target, found))
            self._done += 1
            self._progress(
                Progress(
                    stage="quantize",
                    done=self._done,
                    total=self._total,
                    layer=layer,
                    module=target.name,
                    error=reports[-1].error,
                    rounding_error=reports[-1].rounding_error,
                )
            )
        return solved, reports

    def _report(self, layer: int | None, one: Measured, target: Target, solved: Solved) -> ModuleReport:
        solution, statistics = solved.solution, one.statistics
        error = rounding_error = None
        if solved.errors:
            whole, *lost = solved.errors
            error, rounding_error = (math.sqrt(part / whole) if whole > 0 else 0.0 for part in lost)
        unpaired = self.cross and statistics is not None and not statistics.paired
        return ModuleReport(
            name=target.name,
            layer=layer,
            shape=target.shape,
            bits=target.config.bits,
            group_size=solution.weight.group_size,
            error=error,
            rounding_error=rounding_error,
            worse_than_rounding=error is not None and rounding_error is not None and error > rounding_error,
            damp_percent=solution.damp_percent,
            damp_escalations=solution.damp_escalations,
            dead_columns=solution.dead_columns,
            seconds=solved.seconds,
            method="gptq" if unpaired else self.config.method,
            tokens=None if statistics is None else statistics.tokens,
            refined=solution.refined(),
            prior_tokens=0 if statistics is None or one.pool is None else max(0, target.shape[1] - statistics.tokens),
        )

    def _install(self, weights: Mapping[str, QuantizedWeight]) -> None:
        """Put solutions in the places of the weights of their modules."""
        for name, weight in weights.items():
            place = matrix(self.model.model.get_submodule(name))
            place.copy_(weight.to(place.device).dequantize())

    def _learn(
        self, layer: int, found: Mapping[str, Solution], solved: dict[str, QuantizedWeight], streams: Streams
    ) -> BlockReport | None:
        """Learn the rounding of a block, and put what came of it in place; None where memory ran out."""
        fisher = self._fisher_of(layer)
        metric = None if fisher is None else fisher.metric
        learned = learn_block(layer, found, streams, metric, self.config, self._progress)
        if learned is None:
            self._install(solved)
            return None
        moved = sum(int((new.codes.cpu() != solved[name].codes).sum()) for name, new in learned.weights.items())
        solved |= {name: weight.to("cpu") for name, weight in learned.weights.items()}
        self._install(solved)
        codes = sum(weight.codes.numel() for weight in solved.values())
        return BlockReport(layer=layer, error=learned.after, error_before=learned.before, codes_changed=moved / codes)

    def _commit(
        self,
        layer: int | None,
        solved: Mapping[str, QuantizedWeight],
        reports: list[ModuleReport],
        streams: Streams,
        learned: BlockReport | None,
    ) -> None:
        """Write what was solved, run what was written, and let it count."""
        progress = {**streams.progress(), "learned": None if learned is None else dataclasses.asdict(learned)}
        progress["left"] = {name: why for name, why in self.left.items() if self.model.part_of(name) == layer}
        written: dict[str, Any] = {}
        with self.processes.together():
            if self.processes.rank == 0:
                written = record_of(write_part(self.job.stem(layer), self.model, layer, solved, self.config))
        written = self.processes.gather(written)[0]
        run = streams.first_sample(layer) if solved and layer is not None else None
        with self.processes.together():
            if run is not None and layer is not None:  # whichever process has a sample
                part = open_part(self.job.folder, written, self.config)
                names = [target.inner for target in self.targets[layer]]
                check_block(self.model, layer, part, names, run, self.device, self.dtype)
        with self.processes.together():
            if self.processes.rank == 0:
                self.job.commit(layer, written, reports, progress)
        self.job.records = self.processes.gather(self.job.records)[0]

    def _matrix(self, target: Target) -> torch.Tensor:
        return matrix(self.model.model.get_submodule(target.name)).detach()
