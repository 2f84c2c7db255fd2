"""Quantize the small model of this repository to 3 bits, and see what it costs: about a minute on two CPU cores."""

from pathlib import Path

import gptqkit

EXAMPLES = Path(__file__).parent
MODEL = EXAMPLES / "models" / "gutenberg-llama-6m"


def main() -> None:
    """Quantize, reload, generate and measure."""
    config = gptqkit.QuantizeConfig(bits=3, group_size=128, sym=False, method="gptaq")
    result = gptqkit.quantize(
        MODEL,
        calibration=EXAMPLES / "data" / "calibration.txt",
        out="demo-out/quickstart",
        config=config,
        samples=64,
        sequence_length=512,
        overwrite=True,
    )
    for module in result.report.to_dict()["modules"][:7]:
        print(f"{module['name']}: error {module['error']:.4f}, plain rounding {module['rounding_error']:.4f}")

    model, tokenizer = gptqkit.load("demo-out/quickstart")
    prompt = tokenizer("It was a dark night, and the captain", return_tensors="pt").to(model.device)
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=30, do_sample=False)[0]))

    scores = gptqkit.evaluate(
        "demo-out/quickstart",
        dataset=EXAMPLES / "data" / "heldout.txt",
        reference=MODEL,
        sequence_length=512,
        max_windows=40,
    )
    print(f"perplexity {scores.perplexity:.3f}, KL divergence from the float model {scores.kl_divergence:.4f}")


if __name__ == "__main__":
    main()
