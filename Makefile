# .venv's Python once there is one that runs, so that PYTHON has to be named only the first time.
PYTHON ?= $(shell .venv/bin/python -c '' 2>/dev/null && echo .venv/bin/python || echo python3)
VENV_PYTHON := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup train test slow wide soak bench lint docs

help:
	@echo "make train   set up .venv if needed, train configs/quickstart.yaml, print the result"
	@echo "make test    set up .venv if needed, run the fast tests; ALL=1: the slow ones too"
	@echo "make slow    set up .venv if needed, run the slow tests"
	@echo "make wide    set up .venv if needed, run the tests that CI leaves out"
	@echo "make soak    set up .venv if needed, run the soak tests; SOAK='-k NAME': some of them"
	@echo "make bench   set up .venv if needed, measure the training speed; QUICK=1: in two minutes"
	@echo "make docs    set up .venv if needed, build the manual into site/"
	@echo "make lint    set up .venv if needed, run ruff and pyright"
	@echo "make setup   set up .venv only"
	@echo "PYTHON=python3.12 make ...   use this Python (3.10 to 3.13) for .venv"

setup:
	@$(PYTHON) -c '' 2>/dev/null || { echo "error: $(PYTHON) does not run here: install Python" \
	  "3.10 to 3.13 or name another one, as in \`PYTHON=python3.12 make setup\`" >&2; exit 1; }
	@$(PYTHON) install/install.py

train: setup
	$(VENV_PYTHON) launch.py configs/quickstart.yaml run.overwrite=true

test: setup
	$(VENV_PYTHON) -m pytest $(if $(filter-out 0,$(ALL)),-m "not wide and not soak")

slow: setup
	$(VENV_PYTHON) -m pytest -m "slow and not wide and not soak"

wide: setup
	$(VENV_PYTHON) -m pytest -m "wide and not soak"

# pytest's exit status 5 means that no test was selected.
soak: setup
	@$(VENV_PYTHON) -m pytest -n 0 -m soak $(SOAK) || { status=$$?; \
	  [ $$status -eq 5 ] && echo "there are no soak tests" || exit $$status; }

bench: setup
	$(VENV_PYTHON) benchmarks $(if $(filter-out 0,$(QUICK)),--quick)

lint: setup
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV_PYTHON) -m pyright --project pyproject.toml --pythonpath $(VENV_PYTHON)

# The site's tools come into .venv with the first build.
docs: setup
	@$(VENV_PYTHON) -c 'import mkdocs, material, mkdocstrings, nbclient, ipykernel' 2>/dev/null || \
	  $(VENV_PYTHON) -m pip install --quiet -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build
