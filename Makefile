# `make demo` and `make test` need Python 3.11 or 3.12 and pip, nothing else. PYTHON=python3.12 chooses another.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := models/tiny-sort
RUN := results/quickstart-$(shell date +%Y%m%d-%H%M%S)

.PHONY: help install demo test check soak clean
help:
	@echo "make demo   install, make the tiny model, train it on the CPU, show what came of it"
	@echo "make test   install, then ruff, pyright and pytest"
	@echo "make check  ruff, pyright and pytest in the environment that is there"
	@echo "make soak   break runs on purpose, some minutes: killed ranks, hung rewards, lost directories"
	@echo "make clean  remove the environment, models and results that make made"

# A stamp a set of packages: installing happens once, and again when pyproject.toml changes.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
	  || { echo "$(PYTHON) is not Python 3.11 or 3.12; name one: make PYTHON=python3.11"; exit 1; }
	@echo "installing into $(VENV) (some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@echo "installing what tests need"
	@$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(MODEL)/config.json: | $(VENV)/installed
	@$(BIN)/python tools/make_tiny_model.py $(MODEL)

install: $(VENV)/installed

demo: $(VENV)/installed $(MODEL)/config.json
	@$(BIN)/dppo train examples/quickstart.yaml policy.model_name=$(MODEL) logger.log_dir=$(RUN)

test: $(VENV)/installed-test
	@$(MAKE) --no-print-directory check

check:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest

soak: $(VENV)/installed-test
	$(BIN)/pytest -m soak

clean:
	rm -rf $(VENV) models results build dist *.egg-info
