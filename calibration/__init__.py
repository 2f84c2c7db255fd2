"""Text -> samples of tokens -> statistics of what each Linear receives."""
