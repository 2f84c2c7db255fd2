"""GPTQ and GPTAQ against plain rounding at 4, 3 and 2 bits, on a real Llama, measured on checkpoints read from disk.

Every checkpoint is also compared with the solver's own weights, put into the float model: both must give the same
perplexity, to the last bit. Exits with 1 where they do not, or where GPTQ does not beat plain rounding.
"""

import sys
import time
from pathlib import Path

import torch

import gptqkit
from gptqkit.loading import load_float

EXAMPLES = Path(__file__).parent
MODEL = EXAMPLES / "models" / "gutenberg-llama-6m"
CALIBRATION = EXAMPLES / "data" / "calibration.txt"
TEST = EXAMPLES / "data" / "wikitext2-test.txt"
OUT = Path("demo-out")

BITS = (4, 3, 2)
METHODS = ("rtn", "gptq", "gptaq")
GROUP_SIZE = 128
SAMPLES = 64
SEQUENCE_LENGTH = 512
TEST_WINDOWS = 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    """Run the demonstration and return its exit code."""
    start = time.monotonic()
    threads = torch.get_num_threads()
    print(f"{MODEL.name} on {DEVICE}, torch {torch.__version__}, {threads} threads; groups of {GROUP_SIZE}, asymmetric")
    print(f"calibration: {SAMPLES} x {SEQUENCE_LENGTH} tokens of {CALIBRATION.name}, seed 0")
    print(f"perplexity: {TEST_WINDOWS} x {SEQUENCE_LENGTH} tokens of {TEST.name}, of checkpoints read from {OUT}/\n")
    print(f"float {perplexity(MODEL):.3f}\n")
    print(
        f"{'bits':>4}" + "".join(f"{method:>10}" for method in METHODS) + "   same as the solver's weights", flush=True
    )

    passed = True
    for bits in BITS:
        reloaded, solved = {}, {}
        for method in METHODS:
            reloaded[method], solved[method] = quantize_and_measure(method, bits)
        same = reloaded == solved
        passed &= same and reloaded["gptq"] < reloaded["rtn"]
        print(
            f"{bits:>4}" + "".join(f"{reloaded[m]:>10.3f}" for m in METHODS) + f"   {'yes' if same else solved}",
            flush=True,
        )

    print(f"\n{time.monotonic() - start:.0f} s")
    if not passed:
        print("FAILED: a checkpoint differs from the solver's weights, or GPTQ does not beat plain rounding")
    return 0 if passed else 1


def quantize_and_measure(method: str, bits: int) -> tuple[float, float]:
    """Perplexities of the checkpoint as reloaded, and of the float model with the solver's weights put into it."""
    out = OUT / f"{method}-{bits}bit"
    calibration = gptqkit.Calibration(CALIBRATION, samples=SAMPLES, sequence_length=SEQUENCE_LENGTH)
    gptqkit.quantize(
        MODEL,
        None if method == "rtn" else calibration,
        out,
        gptqkit.QuantizeConfig(bits=bits, group_size=GROUP_SIZE, sym=False, method=method),
        run=gptqkit.Run(device=DEVICE, overwrite=True),
    )
    model, tokenizer = load_float(MODEL, device=DEVICE, dtype=torch.float32)
    checkpoint = gptqkit.open_checkpoint(out)
    with torch.no_grad():
        for name in checkpoint.layers:
            model.get_submodule(name).weight.copy_(checkpoint.weight(name).dequantize())
    return perplexity(out), perplexity(model, tokenizer)


def perplexity(model: object, tokenizer: object = None) -> float:
    """Perplexity of a checkpoint, or of a model in memory, in float32."""
    how = gptqkit.Evaluation(sequence_length=SEQUENCE_LENGTH, max_windows=TEST_WINDOWS, device=DEVICE, dtype="float32")
    return gptqkit.evaluate(model, TEST, how, tokenizer=tokenizer).perplexity


if __name__ == "__main__":
    sys.exit(main())
