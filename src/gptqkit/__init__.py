"""GPTQ and GPTAQ quantization of language models."""
