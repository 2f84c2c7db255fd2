# Everything sets itself up: `make demo` and `make test` need no more than Python 3.10 or later.
#   make test      the tests, but for the slow ones
#   make test-all  all tests
#   make demo      quantize the example model at 4, 3 and 2 bits, reload it and measure it
#   make check     what CI runs: ruff, mypy, tests
#   make sanitize  the CUDA kernels on the emulator under AddressSanitizer and UBSan (needs g++)
#   make families  tiny models of all families of transformers: what becomes of each (about half an hour)
#   make clients   load our checkpoints with other programs, in environments of their own (long)
# PYTHON is the interpreter that makes the environment, VENV where it goes, WORKERS how many processes run tests: one more than
# two cores, since some wait for disks.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 3

python := $(VENV)/bin/python
# pip writes the command on installing, so it also tells when that was done.
installed := $(VENV)/bin/gptqkit
pytest := OMP_NUM_THREADS=1 $(python) -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: setup test test-all demo check sanitize families clients clean

setup: $(installed)

$(installed): pyproject.toml setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(python) -m pip install -c constraints.txt -e ".[dev]"
	touch $@

test: $(installed)
	$(pytest) -m "not slow"

test-all: $(installed)
	$(pytest)

demo: $(installed)
	$(python) examples/demo.py

check: $(installed)
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	$(python) -m mypy tests/typed_use.py examples/quantize_and_evaluate.py
	$(pytest) -m "not slow"

# Python does not give all its memory back, so leaks are not looked for.
sanitize: $(installed)
	$(python) tests/support/emulator.py build/sanitize/libgptqkit_emulator.so --sanitize
	PYTHONPATH=src:tests LD_PRELOAD=$$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		$(python) tests/support/kernel_cases.py build/sanitize/libgptqkit_emulator.so

families: $(installed)
	$(python) tests/families.py --json benchmarks/results/families.json --markdown benchmarks/results/families.md

clients: $(installed)
	tests/clients/run

clean:
	rm -rf build dist demo-out *.egg-info
