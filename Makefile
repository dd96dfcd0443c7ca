# Every target sets up what it needs in .venv; nothing has to be installed first but Python 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test check crash bench fix clean

demo: $(VENV)/.demo ## train a small model end to end
	$(BIN)/loopline demo

test: $(VENV)/.dev ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadgroup

check: $(VENV)/.dev ## style, types, who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

crash: $(VENV)/.dev ## every kill, power cut, damage and fault of the acceptance matrix, in full numbers
	LOOPLINE_FULL=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --timeout 3600 -rP tests/crash tests/checkpoint \
		tests/stores tests/data tests/callbacks/test_preempt.py tests/loop/test_loop_closing.py

bench: $(VENV)/.dev ## cost per step against a bare loop, of exact data, and of checkpoints
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/data_keys.py
	$(BIN)/python benchmarks/checkpoints.py

fix: $(VENV)/.dev ## repair what can be repaired mechanically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and pinned, so that no other package brings a build of its own choice
$(VENV)/.torch: requirements/constraints.txt | $(VENV)/bin/python
	$(PIP) install -c requirements/constraints.txt torch
	touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) install -c requirements/constraints.txt -e '.[demo]'
	touch $@

# strace shows that an import opens nothing; where it cannot be installed, the tests that use it say so
$(VENV)/.system: | $(VENV)/bin/python
	command -v strace >/dev/null || (apt-get update -qq && apt-get install -y -qq strace) >/dev/null 2>&1 || true
	touch $@

$(VENV)/.dev: pyproject.toml requirements/dev.txt $(VENV)/.torch $(VENV)/.system
	$(PIP) install -c requirements/constraints.txt -r requirements/dev.txt -e '.[demo]'
	touch $@
