# The course's commands: `make` lists them. PYTHON=python3.12 make lab uses that Python instead of python3.
PYTHON ?= python3

# Commands in .venv find its programs (pip, torchrun) and kernel before those of the user and the machine.
VENV := $(CURDIR)/.venv
IN_VENV = VIRTUAL_ENV="$(VENV)" PATH="$(VENV)/bin:$$PATH" \
          JUPYTER_PATH="$(VENV)/share/jupyter$${JUPYTER_PATH:+:$$JUPYTER_PATH}"
AS_ROOT = $(if $(filter 0,$(shell id -u)),--allow-root)
CHINESE = $(filter zh,$(LANGUAGE))
START = /lab/tree/$(if $(CHINESE),zh/)lessons/00_start_here.ipynb
NBVAL = --nbval-lax --nbval-current-env --nbval-cell-timeout=300 --nbval-kernel-startup-timeout=300
# At the priority of `course grade`'s sandboxes: beside tests of a higher one, these take ten times as long.
PYTEST = $(IN_VENV) nice -n 19 python -m pytest -p tests.support.tiers $(NBVAL) --durations=10
SIDE_BY_SIDE = -n 4  # on two cores, too: half of the time a test waits

# Tests that measure time or memory run alone, after the others.
define IN_TWO_PARTS
@status=0; \
$(PYTEST) $(SIDE_BY_SIDE) -m "$(1) and not alone" $(ARGS) lessons tests || status=1; \
$(PYTEST) -m "$(1) and alone" $(ARGS) tests || status=1; \
exit $$status
endef

# What `make oldest` runs: the library's core, and the lessons that use most of it
OLDEST_TESTS = tests/launcher/test_launch.py tests/run tests/report/test_failed.py tests/exercises/test_check.py \
               tests/data tests/rank/test_recorder.py tests/rank/test_entry_function.py tests/test_pickling.py \
               tests/test_compat.py
OLDEST_LESSONS = $(foreach number,00 02 06 08 10 13,$(wildcard lessons/$(number)_*.ipynb))

.PHONY: help setup lab update test test-all nightly oldest newest versions lint lesson look site bench host gpu

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /make \1: /p' Makefile

setup:  ## make .venv with all that the course needs; at once when nothing changed
	@command -v "$(PYTHON)" >/dev/null || { echo "Set-up stopped: there is no $(PYTHON) here: install Python 3.11 or newer," \
	    "or name one, as in \`PYTHON=python3.12 make setup\`." >&2; exit 1; }
	@"$(PYTHON)" .ci/setup.py $(SETUP_ARGS)

lab: setup  ## open JupyterLab on the first lesson; LANGUAGE=zh: in Chinese; ARGS=--no-browser: without a screen
	@$(if $(CHINESE),$(IN_VENV) python -m course_lib zh)
	@$(IN_VENV) python -m jupyterlab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir="$(CURDIR)" \
	    --LabApp.default_url=$(START) $(AS_ROOT) $(ARGS)

update: setup  ## the newest version of the course, with your answers and changes kept
	@$(IN_VENV) python .ci/update.py
	@$(MAKE) --no-print-directory setup

test: lint  ## in minutes: lint, each room of the library, faults, every exercise, five lessons; LF=1: what failed
	@$(PYTEST) $(SIDE_BY_SIDE) -m short $(if $(LF),--again) lessons tests
	@echo "make test: $(if $(LF),what failed before has passed,lint and the short run passed)." \
	    "\`make test-all\` runs what was deselected, too: every lesson, every wrong answer, the grader's walls," \
	    "Slurm, the browser."

test-all: lint  ## all tests and notebooks, as CI does
	$(call IN_TWO_PARTS,not night)
	@echo "make test-all: lint passed, and all tests and notebooks that ran."

nightly: setup  ## what a night has time for: other numbers of ranks, all lessons in a browser, other draws, oldest, newest
	@status=0; \
	$(PYTEST) $(SIDE_BY_SIDE) -m "night and not alone" tests || status=1; \
	$(PYTEST) -m "night and alone" tests || status=1; \
	COURSE_DRAWS=$$(date +%j) $(PYTEST) $(SIDE_BY_SIDE) tests/exercises/test_questions.py || status=1; \
	$(MAKE) --no-print-directory oldest || status=1; \
	$(MAKE) --no-print-directory newest || status=1; \
	exit $$status

# A separate COURSE_HOME: digits drawn by a newer matplotlib would hide what this one draws.
oldest: VENV := $(CURDIR)/.venv-oldest
oldest: export COURSE_HOME = $(VENV)/course-home
oldest:  ## doctor, core tests and six lessons with the lowest versions that pyproject.toml allows (.venv-oldest)
	@$(MAKE) --no-print-directory setup SETUP_ARGS=--oldest
	@$(IN_VENV) python -m course_lib doctor
	@$(PYTEST) $(OLDEST_TESTS)
	@$(PYTEST) $(OLDEST_LESSONS)
	@echo "make oldest: doctor, tests and notebooks passed with the lowest versions."

newest: VENV := $(CURDIR)/.venv-newest
newest: export COURSE_HOME = $(VENV)/course-home
newest:  ## doctor and everything with the newest versions that the package index has (.venv-newest)
	@$(MAKE) --no-print-directory setup SETUP_ARGS=--newest
	@$(IN_VENV) python -m course_lib doctor
	$(call IN_TWO_PARTS,not night)
	@echo "make newest: doctor, tests and notebooks passed with the newest versions."

versions: newest  ## newest, and then constraints.txt: the versions that passed
	@"$(CURDIR)/.venv-newest/bin/python" .ci/versions.py

lint: setup  ## ruff: rules and format; mypy: the types of course_lib; the form of the workflows
	@$(IN_VENV) python -m ruff check
	@$(IN_VENV) python -m ruff format --check
	@$(IN_VENV) python -m mypy
	@$(IN_VENV) python -m check_jsonschema -qq --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(IN_VENV) python -m check_jsonschema -qq --builtin-schema vendor.github-actions .github/actions/*/action.yml

lesson: setup  ## execute lessons and save them with their outputs: make lesson N=06, or N='00 deeper/06_buckets'
	@$(IN_VENV) python tests/notebooks/execute.py $(N)

look: setup  ## the same in a real JupyterLab, as pictures: opened, run, clicked: make look N=06
	@PYTHONPATH=. $(IN_VENV) python tests/browser/look.py $(N)

site: setup  ## the lessons with their saved outputs, the exercises and the reference as pages, in .site/html
	@$(IN_VENV) python .ci/site/build.py
	@echo "The pages begin at .site/html/index.html"

bench: setup  ## what the course promises about speed, measured; ARGS="--rounds 3 --only starts"
	@$(IN_VENV) python -m tests.benchmarks.bench $(ARGS)
	@COURSE_KERNELS=30 $(IN_VENV) python -m pytest -sq tests/faults/test_many.py -k kernels

host: setup  ## what a kernel takes of a server's memory; COURSE_LEAN=1 for a lean one
	@$(IN_VENV) python -m tests.benchmarks.host

gpu:  ## on a machine with a GPU: its tests, the lessons, the figures they show of it; tests/gpu/run.py has the options
	@"$(PYTHON)" tests/gpu/run.py $(if $(WHEELS),--wheels "$(WHEELS)") $(if $(OUT),--out "$(OUT)") $(ARGS)
