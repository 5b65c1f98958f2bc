# Each target sets everything up in .venv on a fresh machine by itself.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint doctor clean

demo: .venv/installed
	$(BIN)/atlas demo --out demo_output

test: .venv/installed
	$(BIN)/python -m pytest -n auto -m "not gpu"
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -n auto tests/hopper

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
	rm -rf .venv demo_output build dist *.egg-info
