# The course's commands: `make` lists them. PYTHON=python3.12 make lab takes another Python than python3.
PYTHON ?= python3

# What runs in .venv meets .venv's programs (pip, torchrun) and kernel before those of the user and the machine.
VENV := $(CURDIR)/.venv
IN_VENV = VIRTUAL_ENV="$(VENV)" PATH="$(VENV)/bin:$$PATH" \
          JUPYTER_PATH="$(VENV)/share/jupyter$${JUPYTER_PATH:+:$$JUPYTER_PATH}"
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)
START = /lab/tree/lessons/00_start_here.ipynb
NBVAL = --nbval-lax --nbval-current-env --nbval-cell-timeout=120 -n 2 --dist loadfile
RANK_COUNTS = tests/notebooks/test_rank_counts.py

.PHONY: help setup lab test lint lesson look bench

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## /make \1: /p' Makefile

setup:  ## make .venv with all that the course needs; at once when nothing changed
	@command -v "$(PYTHON)" >/dev/null || { echo "Set-up stopped: there is no $(PYTHON) here: install Python 3.11 or newer," \
	    "or name one, as in \`PYTHON=python3.12 make setup\`." >&2; exit 1; }
	@"$(PYTHON)" .ci/setup.py

lab: setup  ## open JupyterLab on the first lesson; ARGS=--no-browser on a server without a screen
	@$(IN_VENV) python -m jupyterlab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir="$(CURDIR)" \
	    --LabApp.default_url=$(START) $(AS_ROOT) $(ARGS)

test: lint  ## everything that CI runs: lint, the tests, every notebook from top to bottom
	@$(IN_VENV) python -m pytest --durations=10 --ignore=$(RANK_COUNTS)
	@$(IN_VENV) python -m pytest $(NBVAL) --durations=10 lessons solutions exercises $(RANK_COUNTS)
	@echo "make test: lint, tests and notebooks passed."

lint: setup  ## ruff: rules and format
	@$(IN_VENV) python -m ruff check
	@$(IN_VENV) python -m ruff format --check

lesson: setup  ## execute lessons and save them with their outputs: make lesson N=06, or N='00 02 06'
	@$(IN_VENV) python tests/notebooks/execute.py $(N)

look: setup  ## the same in a real JupyterLab, as pictures of what a learner sees: make look N=06
	@PYTHONPATH=. $(IN_VENV) python tests/browser/look.py $(N)

bench: setup  ## what the course promises about speed, measured beside other tools; ARGS="--rounds 3 --only starts"
	@$(IN_VENV) python tests/benchmarks/bench.py $(ARGS)
