"""Quantize the small model of this repository to 3 bits, and see what it costs: about a minute on two CPU cores."""

from pathlib import Path

import gptqkit

EXAMPLES = Path(__file__).parent
MODEL = EXAMPLES / "models" / "gutenberg-llama-6m"


def main() -> None:
    """Quantize, reload, generate and measure."""
    result = gptqkit.quantize(
        MODEL,
        gptqkit.Calibration(EXAMPLES / "data" / "calibration.txt", samples=64, sequence_length=512),
        "demo-out/quickstart",
        gptqkit.QuantizeConfig(bits=3, group_size=128, sym=False),
        run=gptqkit.Run(overwrite=True),
    )
    for module in result.report.modules[:7]:
        print(f"{module.name}: error {module.error:.4f}, plain rounding {module.rounding_error:.4f}")

    model, tokenizer = gptqkit.load(result.path)
    prompt = tokenizer("It was a dark night, and the captain", return_tensors="pt").to(model.device)
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=30, do_sample=False)[0]))

    how = gptqkit.Evaluation(sequence_length=512, max_windows=40)
    scores = gptqkit.evaluate(result.path, EXAMPLES / "data" / "heldout.txt", how, reference=MODEL)
    print(f"perplexity {scores.perplexity:.3f}, KL divergence from the float model {scores.kl_divergence:.4f}")


if __name__ == "__main__":
    main()
