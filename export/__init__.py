"""Codes, scales and zeros <-> checkpoint files."""
