# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Several processes with one thread each: threads of tiny models wait for each other.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile

.PHONY: setup demo test test-fast test-flower test-flower-versions test-gpu lint docs notebooks bench clean

setup: $(VENV)/.installed

# What the demo needs. The tests need far more packages: .installed adds them.
$(VENV)/.package: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedalign needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed: $(VENV)/.package
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps byzfl==0.0.11  # for tests; its dependencies bring CUDA
	@touch $@

demo: $(VENV)/.package  ## the main job: five arms, five seeds, 200 rounds of synth-medium, with its report
	$(BIN)/fedalign run synth-medium

test: setup lint  ## all tests
	$(PYTEST)

test-fast: setup lint  ## the tests that take no server and no long run: under two minutes
	$(PYTEST) -m "not slow and not processes and not pictures" --ignore=tests/reference --ignore=tests/gpu --ignore=tests/flower --ignore=tests/simulation/test_ray.py

test-flower: setup  ## the tests of the federation over Flower, with real processes; also part of `make test`
	$(BIN)/pytest tests/flower

# Each version gets an environment that differs from .venv in Flower alone. A database of 1.42 is not one of 1.41's.
FLOWER_VERSIONS ?= 1.41.0 1.42.0
test-flower-versions: setup  ## the tests of the federation over Flower, with every version of Flower that is supported
	for version in $(FLOWER_VERSIONS); do \
	  venv=$(VENV)/flower-$$version && $(PYTHON) -m venv $$venv && \
	  $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($$venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/all.pth && \
	  $$venv/bin/pip install --quiet --disable-pip-version-check --no-deps flwr==$$version --editable . && \
	  $$venv/bin/python -m pytest tests/flower || exit 1; \
	done

test-gpu: setup  ## the tests of what runs on a GPU: kernels, engines, runs; skipped with a reason where there is none
	$(BIN)/pytest --confcutdir=tests/gpu -rs -W default tests/gpu

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup  ## the documentation site, in docs/_build/html; a warning fails it
	$(BIN)/python -m sphinx -E -a -W --keep-going -n -q -b html -d docs/_build/doctrees docs docs/_build/html
	@echo docs/_build/html/index.html

notebooks: setup  ## run the notebooks and store their outputs
	$(BIN)/pytest --nbmake --overwrite docs/notebooks

bench: setup  ## batched engine against the reference loop, in one run on this machine
	$(BIN)/fedalign bench

clean:
	rm -rf $(VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
