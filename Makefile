# From a clean clone with nothing but Python 3.11 or newer: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without an NVIDIA GPU the CPU build of torch is enough, and gigabytes smaller.
GPU := $(shell command -v nvidia-smi)
CONSTRAINTS := $(if $(GPU),,-c constraints-cpu.txt)
TORCH_CPU := install --quiet -r constraints-cpu.txt

.PHONY: demo test lint clean

demo: $(VENV)/.ready  ## calibrate the demo model; needs no network
	HF_HUB_OFFLINE=1 $(BIN)/rotationzoo calibrate demo --restart

test: $(VENV)/.ready-dev  ## linter, type checker and all tests
	$(BIN)/python -m pytest -n 2

$(VENV)/.ready: pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(GPU),)
	@echo "No NVIDIA GPU here: installing the CPU build of torch"
	$(BIN)/python -m pip $(TORCH_CPU) --retries 0 --timeout 5 --index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
		|| $(BIN)/python -m pip $(TORCH_CPU)
endif
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e .
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
