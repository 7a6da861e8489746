# The only things needed beforehand are Python 3.11+ and make.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: venv demo test faults notebooks lint clean

venv: .venv/.done

.venv/.done: requirements.txt requirements-dev.txt constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -r requirements-dev.txt -c constraints.txt
	touch $@

# Trains FlatMatch on the embedded digits with 40 labels, in about a minute, and
# makes a page of what came out.
demo: venv
	$(BIN)/python main.py --workdir runs/demo
	$(BIN)/python -m flatmatch_jax.report --workdir runs/demo

test: venv
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Kills runs, fills disks, tears files: see docs/faults.md. Takes minutes.
faults: venv
	$(BIN)/python tests/faults.py

# Executes the notebooks whole and keeps their outputs: minutes.
notebooks: venv
	$(BIN)/python notebooks/run.py

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv runs
