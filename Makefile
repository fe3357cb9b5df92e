# From a clean clone with nothing but Python 3.11 or newer: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without an NVIDIA GPU, the CPU build of torch is enough, and gigabytes smaller.
GPU := $(shell command -v nvidia-smi)
# A file that pins versions, such as constraints-oldest.txt. CI tests with several.
CONSTRAINTS ?= $(if $(GPU),,constraints-cpu.txt)
INSTALL := install --quiet $(addprefix -c ,$(CONSTRAINTS))
TORCH_CPU := install --quiet $(addprefix -c ,$(filter-out constraints-cpu.txt,$(CONSTRAINTS))) \
	$(if $(filter constraints-cpu.txt,$(CONSTRAINTS)),-r constraints-cpu.txt,torch)
# Arguments for pytest: make test ARGS="tests/linalg -x"
ARGS ?=

# Tests marked `thorough` run only in `make check`: the linter and the type checker, the wheel, the site,
# pages in a browser, the quick start, and every model family.
QUICK := not slow and not thorough and not vllm

# Settings that change the order of sums: CPU kernels and threads. `make test` runs all tests with the
# processor's own kernels and one thread.
ORDERS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2
# If oneDNN finds AMX, torch packs for it, whatever kernels were requested, and then fails.
WITHOUT_AMX := ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16
CHECKED := $(addprefix tests/,linalg codec simulation cache generation vllm calibration evaluation)
# Skipped: tests that compare no sums (memory, GPU compilers), and the slowest whole commands.
UNCHECKED := not test_memory and not spilled and not compiles \
	and not test_tasks and not command_line

.PHONY: help demo test check lint format gpu vllm coverage docs lock clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "%-14s%s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.ready  ## calibrate the demo model and ask it about its context; needs no network
	HF_HUB_OFFLINE=1 $(BIN)/rotationzoo demo --restart

test: $(VENV)/.ready-dev  ## the tests to run after every change: five minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "$(QUICK)" $(ARGS)

# pytest exits with 5 if ARGS name no thorough test.
check: $(VENV)/.ready-dev  ## the thorough tests, and the numeric tests again with other CPU kernels and thread counts
	@failed=0; $(BIN)/python -m pytest -n 2 -m thorough $(ARGS) || [ $$? -eq 5 ] || failed=1; \
	for order in $(ORDERS); do \
		echo "$$order"; \
		env OMP_WAIT_POLICY=passive $(WITHOUT_AMX) $$order $(BIN)/python -m pytest -n 2 -m "$(QUICK)" -k "$(UNCHECKED)" \
			$(or $(ARGS),$(CHECKED)) || failed=1; \
	done; exit $$failed

lint: $(VENV)/.ready-dev  ## the linters of code and workflows, the formatter's check and the type checker, as in pre-commit
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/zizmor --offline --quiet .github/workflows docs/fleet.yml

format: $(VENV)/.ready-dev  ## format the code and apply the linter's safe fixes
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

gpu: $(VENV)/.ready-dev  ## the tests that need an NVIDIA GPU
	$(BIN)/python -m pip $(INSTALL) -e '.[cuda]'
	$(BIN)/python -m pytest -m gpu $(ARGS)

vllm: $(VENV)/.ready-dev .venv-vllm/.ready  ## the tests that start a real vLLM (CPU), in a separate environment of 3.5 GB
	$(BIN)/python -m pytest -n 2 --dist loadfile -m vllm $(ARGS)

.venv-vllm/.ready: pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet -e '.[vllm]'
	@# The connector that sends pages to another server; also works on a CPU.
	.venv-vllm/bin/python -m pip install --quiet --no-deps nixl==1.5.1 nixl-cu12==1.5.1
	@# vLLM installs these, but they do not fit its torch.
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

coverage: $(VENV)/.ready-dev  ## all tests, with a list of the lines that none of them runs
	$(BIN)/python -m pytest -n 2 --cov --cov-report=term-missing $(ARGS)

docs: $(VENV)/.ready  ## write the generated parts of docs/, and build the site in build/docs
	$(BIN)/python -m pip $(INSTALL) -e '.[docs]'
	$(BIN)/python scripts/tools/write_architecture.py
	$(BIN)/python scripts/tools/write_cli_reference.py
	$(BIN)/python scripts/tools/engines_table.py
	$(BIN)/python -m sphinx -q -W --keep-going -n docs build/docs
	@echo "Open build/docs/index.html"

# The platform of the workflows: Linux x86-64 with CPython 3.12.
RUNNER := --python-version 3.12 --implementation cp --abi cp312 --platform manylinux2014_x86_64 --platform linux_x86_64 \
	$(foreach minor,17 24 26 27 28,--platform manylinux_2_$(minor)_x86_64)
RESOLVE := install --isolated --dry-run --ignore-installed --quiet --index-url https://pypi.org/simple --only-binary :all: $(RUNNER)
PINS := .install[] | select(.is_direct | not) | [(.metadata.name | ascii_downcase | gsub("_"; "-")), .metadata.version, \
	.download_info.archive_info.hashes.sha256] | "\(.[0])==\(.[1]) --hash=sha256:\(.[2])"

lock: $(VENV)/.ready-dev  ## resolve the workflows' dependencies again, with hashes: .github/requirements*.txt (needs jq)
	for lock in requirements=cuda,report,sign requirements-dev=dev; do \
		file=.github/$${lock%%=*}.txt; \
		PIP_CONFIG_FILE=/dev/null $(BIN)/python -m pip $(RESOLVE) --target $(VENV)/none --report $(VENV)/report.json \
			".[$${lock#*=}]" "setuptools>=77" || exit 1; \
		{ grep '^#' $$file; jq -r '$(PINS)' $(VENV)/report.json | LC_ALL=C sort -t= -k1,1; } > $(VENV)/lock && mv $(VENV)/lock $$file || exit 1; \
	done

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(GPU),)
	@echo "No NVIDIA GPU here: installing the CPU build of torch"
	$(BIN)/python -m pip $(TORCH_CPU) --retries 0 --timeout 5 --index-url https://download.pytorch.org/whl/cpu 2>/dev/null \
		|| $(BIN)/python -m pip $(TORCH_CPU)
endif
	$(BIN)/python -m pip $(INSTALL) -e '.[report]'
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python -m pip $(INSTALL) -e '.[dev]'
	touch $@

clean:  ## remove the virtual environment
	rm -rf $(VENV)
