"""Text -> token windows -> statistics of what each Linear receives."""

from .windows import TokenWindows, load_texts, load_tokens, load_windows

__all__ = ["TokenWindows", "load_texts", "load_tokens", "load_windows"]
