"""Calibration tokens in batches, and what they feed a module turned into statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import ArchitectureError, ConfigError, NonFiniteError
from .statistics import InputStatistics
from .windows import TokenWindows

_LOG = logging.getLogger("gptqkit")
_Result = TypeVar("_Result")


class CalibrationBatches:
    """Calibration tokens as batches on the device, and which of their samples count.

    A batch is named by the range of its samples.

    Args:
        windows: All calibration tokens.
        batch_size: Samples per batch, at most; it is halved where memory runs out.
        device: Where the batches are wanted.

    Attributes:
        samples: The samples that this process works on; at first all.
        counts: (samples,) bool, False for samples left out.

    Raises:
        ConfigError: `batch_size` is not positive.
    """

    def __init__(self, windows: TokenWindows, batch_size: int, device: torch.device) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be positive")
        self.device = device
        self.batch_size = batch_size
        self.samples = range(len(windows.input_ids))
        self.counts = torch.ones(len(windows.input_ids), dtype=torch.bool)
        self._windows = windows

    def __getitem__(self, samples: range) -> Mapping[str, Tensor]:
        """input_ids and, where there is padding, attention_mask of some samples, each (samples, length)."""
        rows = slice(samples.start, samples.stop)
        batch = {"input_ids": self._windows.input_ids[rows].to(self.device)}
        if self._windows.attention_mask is not None:
            batch["attention_mask"] = self._windows.attention_mask[rows].to(self.device)
        return batch

    def each(self, run: Callable[[range], _Result], use: Callable[[range, _Result], None]) -> None:
        """Call `use(samples, run(samples))` for every batch.

        Where `run` finds too little memory, the batch size is halved for good and the batch is run again.

        Raises:
            RuntimeError: Too little memory for a single sample; see `out_of_memory`.
        """
        start = self.samples.start
        while start < self.samples.stop:
            samples = range(start, min(start + self.batch_size, self.samples.stop))
            try:
                result = run(samples)
            except RuntimeError as error:
                if len(samples) == 1 or not out_of_memory(error):
                    raise
                self.batch_size = len(samples) // 2
                _LOG.warning("out of memory with %d samples; going on with %d", len(samples), self.batch_size)
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            use(samples, result)
            del result  # not beside that of the next batch
            start = samples.stop

    @property
    def excluded(self) -> int:
        """Samples left out so far."""
        return int((~self.counts).sum())

    @property
    def tokens(self) -> int:
        """Tokens that count."""
        mask = self._windows.attention_mask
        per_sample = self._windows.input_ids.shape[1] if mask is None else mask.sum(1)
        return int((self.counts * per_sample).sum())

    def add(
        self,
        statistics: Sequence[InputStatistics],
        samples: range,
        inputs: Tensor,
        float_inputs: Tensor | None,
        *,
        routed: bool = False,
        tokens: Tensor | None = None,
        layer: int | None,
        module: str,
        skip: bool,
    ) -> None:
        """Add what one batch feeds one module to its statistics, padding and excluded samples masked out.

        Args:
            statistics: What to add to.
            samples: The batch.
            inputs: What the module receives, (..., in).
            float_inputs: The same in the float model; for statistics with pairs.
            routed: Whether the rows are those of some tokens only, as experts receive them.
            tokens: Then which of the batch's tokens each row is; None where nobody knows.
            layer: Number of the block, for messages.
            module: Name of the module, for messages.
            skip: Leave out samples with NaN or infinity.

        Raises:
            NonFiniteError: NaN or infinity in a sample that counts, unless `skip`, which excludes it from here on.
            ArchitectureError: Padding, and inputs whose rows are not the tokens of the batch.
        """
        mask = self._token_mask(samples)
        streams = [inputs] if float_inputs is None else [inputs, float_inputs]
        streams = [stream.reshape(-1, stream.shape[-1]) for stream in streams]
        count = len(streams[0])
        if tokens is None and not routed and count == mask.numel():
            tokens = torch.arange(count, device=mask.device)
        if tokens is None:
            if not bool(mask.all()):
                raise ArchitectureError(
                    f"{module} receives {count} rows for {mask.numel()} tokens, so padding and samples left out cannot "
                    "be told apart; calibrate on whole windows (concatenate=True)"
                )
        else:
            broken = torch.stack([~torch.isfinite(stream).all(-1) for stream in streams]).any(0)
            bad = torch.unique(tokens[broken & mask.flatten()[tokens]] // mask.shape[1]).cpu()
            if len(bad):
                if not skip:
                    raise NonFiniteError(
                        f"NaN or infinity in the inputs of {module}, {_where(layer)}, calibration sample "
                        f"{samples.start + int(bad[0])}; "
                        "check the model in this dtype, or set skip_nonfinite=True to leave such samples out"
                    )
                self.counts[samples.start + bad] = False
                mask = self._token_mask(samples)
            if not bool(mask.all()):
                keep = mask.flatten()[tokens]
                streams = [stream[keep] for stream in streams]
        for one in statistics:
            one.update(*streams)

    def settle(self, counts: Sequence[Tensor], *, layer: int | None, module: str) -> None:
        """Leave out what any process left out.

        Args:
            counts: `counts` of all processes.
            layer: For messages.
            module: For messages.

        Raises:
            NonFiniteError: No sample is left.
        """
        self.counts = torch.stack(list(counts)).all(0)
        if not self.counts.any():
            raise NonFiniteError(
                f"NaN or infinity in every calibration sample: none is left at the inputs of {module}, "
                f"{_where(layer)}; check the model in this dtype"
            )

    def _token_mask(self, samples: range) -> Tensor:
        """(samples, length) bool on the device: tokens that are neither padding nor in an excluded sample."""
        rows = slice(samples.start, samples.stop)
        counts = self.counts[rows, None].expand(-1, self._windows.input_ids.shape[1])
        mask = self._windows.attention_mask
        return (counts if mask is None else counts & mask[rows]).to(self.device)


def _where(layer: int | None) -> str:
    return "the output layer" if layer is None else f"block {layer}"


def out_of_memory(error: BaseException) -> bool:
    """Whether torch found too little memory, on a GPU or for a CPU, where it has no error of its own for that."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
