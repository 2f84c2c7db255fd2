"""Weights and the moments of their inputs -> integer codes, scales and offsets."""
