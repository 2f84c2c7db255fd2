"""The version, stated once: the package metadata and the checkpoints read it from here."""

__version__ = "0.1.0"
