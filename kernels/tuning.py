"""How a product is divided over a GPU: constants per device, measured by benchmarks/tune.py, in devices/*.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "devices"
BITS = (2, 3, 4, 8)
MOST_SPLITS = 64  # the interface's limit
LEAST_DENSE_ROWS, DENSE_TILE = 1024, 256  # fewer output rows at a time leave parts of a large GPU idle


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The constants of one device; the defaults are calculated, not measured.

    Attributes:
        blocks_per_multiprocessor: Blocks to aim at; fewer column tiles than that are split along the inputs.
        least_inputs_per_block: Inputs that make a block's work worth its reduction.
        crossover: For each bit width the rows of x from which dequantizing and a dense product is faster.
        dense_bytes: Of the dense weight that exists at a time on that path, for the L2 cache.
    """

    blocks_per_multiprocessor: float = 2.0
    least_inputs_per_block: int = 512
    crossover: Mapping[int, int] = field(default_factory=lambda: dict.fromkeys(BITS, 128))
    dense_bytes: int = 32 << 20

    def dense_rows(self, row_bytes: int) -> int:
        """Return how many rows of the dense weight to make at a time, for whole tiles of a matrix product."""
        return max(LEAST_DENSE_ROWS, self.dense_bytes // row_bytes // DENSE_TILE * DENSE_TILE)

    def split(self, tiles: int, columns: int, multiprocessors: int) -> int:
        """Return how many blocks share a tile's inputs, so that all blocks come near what the device can hold.

        Args:
            tiles: Blocks without a split.
            columns: The layer's inputs.
            multiprocessors: Of the device.
        """
        wanted = round(self.blocks_per_multiprocessor * multiprocessors / tiles)
        return max(1, min(wanted, columns // self.least_inputs_per_block, MOST_SPLITS))


@cache
def tuning_for(device: str, folder: Path = FOLDER) -> Tuning:
    """Return the constants measured on a device of that name, or the defaults."""
    path = folder / file_name(device)
    if not path.exists():
        return Tuning()
    constants = json.loads(path.read_text(encoding="utf-8"))["constants"]
    return Tuning(**constants | {"crossover": {int(bits): rows for bits, rows in constants["crossover"].items()}})


def file_name(device: str) -> str:
    """Return the name of the file for a device.

    >>> file_name("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3.json'
    """
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"
