"""How a product is divided over a GPU: constants per device, measured by benchmarks/tune.py, in devices/*.json.

`default.json` serves devices without a file of their own; its numbers are calculated, not measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "devices"

# The interface's limit.
MOST_SPLITS = 64

# Fewer output rows at a time leave parts of a large GPU idle: 1024 x 2048 outputs are 128 tiles of 128 x 128.
LEAST_DENSE_ROWS = 1024
DENSE_TILE = 256


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The constants of one device.

    Attributes:
        blocks_per_multiprocessor: Blocks to aim at; fewer column tiles than that are split along the inputs.
        least_inputs_per_block: Inputs that make a block's work worth its reduction.
        crossover: For each bit width the rows of x from which dequantizing and a dense product is faster.
        dense_bytes: Of the dense weight that exists at a time on that path: large enough for full matrix products,
            small enough for the L2 cache.
    """

    blocks_per_multiprocessor: float
    least_inputs_per_block: int
    crossover: Mapping[int, int]
    dense_bytes: int

    def fused(self, bits: int, rows: int) -> bool:
        """Whether `rows` rows of x run on the fused kernel."""
        return rows < self.crossover[bits]

    def dense_rows(self, row_bytes: int) -> int:
        """Rows of the dense weight to make at a time, for whole tiles of a matrix product."""
        return max(LEAST_DENSE_ROWS, self.dense_bytes // row_bytes // DENSE_TILE * DENSE_TILE)

    def split(self, tiles: int, columns: int, multiprocessors: int) -> int:
        """Blocks that share a tile's inputs, so that all blocks together come near what the device can hold.

        Args:
            tiles: Blocks without a split.
            columns: The layer's inputs.
            multiprocessors: Of the device.
        """
        wanted = round(self.blocks_per_multiprocessor * multiprocessors / tiles)
        return max(1, min(wanted, columns // self.least_inputs_per_block, MOST_SPLITS))


def file_name(device: str) -> str:
    """The file for a device of that name.

    >>> file_name("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3.json'
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


@cache
def tuning_for(device: str) -> Tuning:
    """The constants measured on a device of that name, or the defaults."""
    path = _FOLDER / file_name(device)
    return read_tuning(path if path.exists() else _FOLDER / "default.json")


def read_tuning(path: Path) -> Tuning:
    """The constants in a file, which is one of ours."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Tuning(
        blocks_per_multiprocessor=content["blocks_per_multiprocessor"],
        least_inputs_per_block=content["least_inputs_per_block"],
        crossover={int(bits): rows for bits, rows in content["crossover"].items()},
        dense_bytes=content["dense_bytes"],
    )
