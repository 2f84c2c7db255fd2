"""Perplexity and divergence of a model, quantized or not, and the embeddings of an encoder."""
