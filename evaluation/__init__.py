"""Perplexity and divergence of a model, quantized or not."""
