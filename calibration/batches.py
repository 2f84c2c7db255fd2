"""Calibration tokens in batches, and what they feed a module turned into statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..errors import ArchitectureError, ConfigError, NonFiniteError
from .hessian import InputStatistics
from .windows import TokenWindows


class CalibrationBatches:
    """Calibration tokens as batches on the device, and which of their samples count.

    Iterating gives mappings of input_ids and, where there is padding, attention_mask, each (samples, length).

    Args:
        windows: All calibration tokens.
        batch_size: Samples per batch.
        device: Where the batches are wanted.

    Raises:
        ConfigError: `batch_size` is not positive.
    """

    def __init__(self, windows: TokenWindows, batch_size: int, device: torch.device) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be positive")
        self.device = device
        self._size = batch_size
        self._ids = torch.split(windows.input_ids, batch_size)
        self._masks = None if windows.attention_mask is None else torch.split(windows.attention_mask, batch_size)
        self._counts = [torch.ones(len(ids), dtype=torch.bool, device=device) for ids in self._ids]

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        batch = {"input_ids": self._ids[index].to(self.device)}
        if self._masks is not None:
            batch["attention_mask"] = self._masks[index].to(self.device)
        return batch

    def first_sample(self) -> Mapping[str, Tensor]:
        """A batch of one sample, to trace with."""
        return {name: tensor[:1] for name, tensor in self[0].items()}

    @property
    def excluded(self) -> int:
        """Samples left out so far."""
        return sum(int((~counts).sum()) for counts in self._counts)

    @property
    def tokens(self) -> int:
        """Tokens that count."""
        return sum(int(self._token_mask(index).sum()) for index in range(len(self)))

    def add(
        self,
        statistics: InputStatistics,
        index: int,
        inputs: Tensor,
        float_inputs: Tensor | None,
        *,
        layer: int | None,
        module: str,
        skip: bool,
    ) -> None:
        """Add what one batch feeds one module to its statistics, padding and excluded samples masked out.

        Raises:
            NonFiniteError: NaN or infinity in a sample that counts, unless `skip`, which excludes it from here on; or
                none is left.
            ArchitectureError: Padding, and inputs whose rows are not the tokens of the batch.
        """
        mask = self._token_mask(index)
        everything = bool(mask.all())
        streams = [inputs] if float_inputs is None else [inputs, float_inputs]
        rows = mask.numel()
        per_token = inputs.shape[:-1].numel() == rows
        if not everything and not per_token:
            raise ArchitectureError(
                f"{module} receives {inputs.shape[:-1].numel()} rows for {rows} tokens, so padding cannot be told "
                "apart; calibrate on whole windows (concatenate=True)"
            )
        if per_token:
            broken = torch.zeros_like(mask)
            for stream in streams:
                broken |= ~torch.isfinite(stream.reshape(*mask.shape, -1)).all(-1)
            samples = (broken & mask).any(1)
            if bool(samples.any()):
                where = "the output layer" if layer is None else f"block {layer}"
                if not skip:
                    sample = index * self._size + int(samples.nonzero()[0])
                    raise NonFiniteError(
                        f"NaN or infinity in the inputs of {module}, {where}, calibration sample {sample}; "
                        "check the model in this dtype, or set skip_nonfinite=True to leave such samples out"
                    )
                self._counts[index] &= ~samples
                if self.excluded == sum(len(ids) for ids in self._ids):
                    raise NonFiniteError(
                        f"NaN or infinity in every calibration sample: none is left at the inputs of {module}, "
                        f"{where}; check the model in this dtype"
                    )
                mask = self._token_mask(index)
                everything = False
        chosen = [stream.reshape(-1, stream.shape[-1]) for stream in streams]
        if not everything:
            chosen = [stream[mask.flatten()] for stream in chosen]
        statistics.update(*chosen)

    def _token_mask(self, index: int) -> Tensor:
        """(samples, length) bool: tokens that are neither padding nor in an excluded sample."""
        counts = self._counts[index][:, None].expand(self._ids[index].shape)
        return counts & self._masks[index].to(self.device) if self._masks is not None else counts
