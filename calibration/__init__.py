"""Text -> token windows -> statistics of what each Linear receives."""
