# Each target sets everything up in .venv on a fresh machine by itself.
PYTHON ?= python3
BIN := .venv/bin
# neighbours stay together, so that what they share is made once; who is done takes over from the others
WORKERS := -n auto --dist worksteal

.PHONY: demo test lint doctor clean

demo: .venv/installed
	$(BIN)/atlas demo --out demo_output

test: .venv/installed
	$(BIN)/python -m pytest $(WORKERS) -m "not gpu"
	TRITON_INTERPRET=0 $(BIN)/python -m pytest $(WORKERS) tests/hopper

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

doctor: .venv/installed
	$(BIN)/atlas doctor --preset all

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv demo_output experiments_output build dist *.egg-info
