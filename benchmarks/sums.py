"""Whether it matters that statistics are summed in float32: the example model quantized with both kinds of sums.

    python benchmarks/sums.py [--json FILE]

Sums in float32 and float64, each in three orders (batches of 8, 4 and 2 samples): if the kinds lie no further apart
than the orders of one kind do, float64 is not worth its time and memory. Half an hour on one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from unittest import mock

import torch

import gptqkit
from gptqkit.calibration import statistics as sums

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODEL = EXAMPLES / "models" / "gutenberg-llama-6m"


class Float64Statistics(sums.InputStatistics):
    """The same sums of the same float32 products, in float64."""

    def __init__(self, columns: int, device: torch.device, *, cross: bool = False) -> None:
        super().__init__(columns, device, cross=cross)
        self._hessian = self._hessian.double()
        self._cross = None if self._cross is None else self._cross.double()

    def update(self, inputs: torch.Tensor, float_inputs: torch.Tensor | None = None) -> None:
        """Add a batch of tokens."""
        with mock.patch.object(sums, "add_product", add_product):
            super().update(inputs, float_inputs)

    def hessian(self) -> torch.Tensor:
        """Return H in float32."""
        return super().hessian().float()

    def cross(self) -> torch.Tensor | None:
        """Return C in float32."""
        found = super().cross()
        return None if found is None else found.float()


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add aT b, computed in float32, to sums of any dtype."""
    total += a.float().T @ b.float()


def measure(kind: type[sums.InputStatistics], batch_size: int, config: gptqkit.QuantizeConfig) -> dict[str, float]:
    """Quantize and evaluate once."""
    calibration = gptqkit.Calibration(EXAMPLES / "data" / "calibration.txt", samples=32, sequence_length=512)
    evaluation = gptqkit.Evaluation(sequence_length=512, max_windows=24, dtype="float32")
    with tempfile.TemporaryDirectory() as folder, mock.patch("gptqkit.streams.InputStatistics", kind):
        out = Path(folder) / "checkpoint"
        result = gptqkit.quantize(MODEL, calibration, out, config, run=gptqkit.Run(batch_size=batch_size))
        scores = gptqkit.evaluate(out, EXAMPLES / "data" / "wikitext2-test.txt", evaluation, reference=MODEL)
    errors = [module.error for module in result.report.modules]
    return {"perplexity": scores.perplexity, "kl": scores.kl_divergence, "error": statistics.fmean(errors)}


def main() -> None:
    """Measure every combination and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    arguments = parser.parse_args()
    rows = []
    for bits, method in itertools.product((2, 3), ("gptq", "gptaq")):
        config = gptqkit.QuantizeConfig(bits=bits, sym=False, method=method)
        for name, kind in (("float32", sums.InputStatistics), ("float64", Float64Statistics)):
            found = [measure(kind, batch_size, config) for batch_size in (8, 4, 2)]
            rows.append({"bits": bits, "method": method, "sums": name, "by_batch_size_8_4_2": found})
            texts = [f"{one['perplexity']:.3f}, KL {one['kl']:.4f}, error {one['error']:.5f}" for one in found]
            print(f"{bits} bits {method:5} {name}: " + " | ".join(texts), flush=True)
    if arguments.json:
        settings = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
