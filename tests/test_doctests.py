"""The examples in the docstrings are true."""

import doctest
import importlib


def test_docstring_examples_hold(module_name: str) -> None:
    result = doctest.testmod(importlib.import_module(module_name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
