# Every target sets up what it needs. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOG := $(VENV)/setup.log
# verifiers pins versions of libraries that vLLM uses, too. uv installs what its agents run.
VERIFIERS := .venv-verifiers
# The tinker client, whose cookbook pins another transformers than vLLM does.
TINKER := .venv-tinker
TINKER_RELEASE := tinker>=0.25,<0.39
VERIFIERS_RELEASE := verifiers[openenv]~=0.4.0
TRANSFORMERS4 := .venv-transformers4
READING_VLLM := 0.26.0
TORCH_CPU := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# Set on the command line to overrule what is found: make setup PYTHON=/opt/python3.12/bin/python3 EXTRA=gpu
PYTHON ?=
TRL ?=
EXTRA ?= $(if $(shell command -v nvidia-smi),gpu,cpu)

# Tests wait for servers and clocks half of the time, so there are two more processes than cores. Slow ones each have a vLLM, and
# at most four of them run at once. Models are tiny: a second thread only costs. CI runs `test`, `test-core` and `test-drawn`.
CORES := $(shell nproc)
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --ignore=tests/gpu --dist loadgroup
FEW = -n $(shell echo $$(($(CORES) < 4 ? $(CORES) : 4)))
MANY = -n $(shell echo $$(($(CORES) < 6 ? $(CORES) + 2 : 8)))
# The same code draws the same tests, with or without git.
CODE = $(shell find bridge cli environments patches tests -name '*.py' | LC_ALL=C sort | xargs cat | sha256sum | cut -c 1-12)

.PHONY: help setup verifiers tinker lint type test test-unit test-core test-drawn test-all test-gpu test-verifiers test-tinker test-foreign several families readers contract soak demo compare bench docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## Make .venv with everything in it (PYTHON=..., EXTRA=cpu|gpu)

verifiers: $(VERIFIERS)/.installed ## Make .venv-verifiers for environments of verifiers and OpenEnv, and install Reasoning Gym

tinker: $(TINKER)/.installed ## Make .venv-tinker with the tinker client

lint: $(INSTALLED) ## ruff's rules and format, and the directions of imports
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: $(INSTALLED) ## mypy, strict
	@$(BIN)/mypy

test: $(INSTALLED) ## Every test that needs no GPU, with the real vLLM on the CPU, but for the slow ones
	@$(PYTEST) $(MANY) -m "not slow" --durations 40 --durations-min 3

test-unit: $(INSTALLED) ## Those of them that need no vLLM
	@$(PYTEST) $(MANY) -m "not slow" --ignore=tests/cpu

test-core: $(INSTALLED) ## One slow test of each kind: the demo, two ranks, a killed trainer, a resumed run, five architectures
	@$(PYTEST) $(FEW) -m "slow and core"

test-drawn: $(INSTALLED) ## A few of the other slow tests, drawn by a hash of the code: over many commits CI runs all of them
	@$(PYTEST) $(FEW) -v --draw "$(or $(SEED),$(CODE))"

test-all: test ## All of the slow ones, before a release: every architecture, learning, long runs, every restart of vLLM
	@$(PYTEST) $(FEW) -m slow

test-gpu: $(INSTALLED) ## The same and more on a GPU
	@$(BIN)/python -m pytest tests/gpu

test-verifiers: $(VERIFIERS)/.installed ## Train on environments of verifiers, OpenEnv and Reasoning Gym, on the CPU
	@$(PYTEST) tests/cpu/test_packages.py

test-tinker: $(TINKER)/.installed ## The tinker client against bridge tinker, without vLLM and with it on the CPU
	@$(PYTEST) tests/unit/tinker tests/cpu/test_tinker.py

test-foreign: $(INSTALLED) ## Tests of others on Bridge: TRL's (TRL=/path/to/its/repository), and what test-verifiers runs
	@$(BIN)/python -m tests.foreign "$(TRL)"
	$(MAKE) --no-print-directory test-verifiers

several: $(INSTALLED) ## Every test of several GPUs and hosts, on few cores, too
	@$(BIN)/python -m pytest tests/cpu/test_gpus.py tests/cpu/test_tensor_parallel.py tests/cpu/test_hosts.py --several

families: $(INSTALLED) ## Prove every family on the CPU, and write docs/families.md from what is found
	@$(BIN)/python -m pytest tests/cpu/test_families.py tests/unit/passes/test_parallel.py --record-families
	$(BIN)/python -m tests.family_results

readers: $(INSTALLED) $(TRANSFORMERS4)/.installed ## Let transformers 4 and vLLM read the checkpoints and exports of every family
	@$(BIN)/python -m tests.readers .readers --transformers4 $(TRANSFORMERS4)/bin/python --vllm $(READING_VLLM) --record

$(TRANSFORMERS4)/.installed:
	@$(BIN)/python -m venv $(TRANSFORMERS4)
	$(TRANSFORMERS4)/bin/python -m pip install --quiet "$(TORCH_CPU)" "transformers==4.57.*" --extra-index-url $(TORCH_CPU_INDEX)
	touch $@

contract: $(INSTALLED) ## Check the pinned symbols in the source of every supported vLLM
	@$(BIN)/python -m pytest tests/contract --every-vllm

soak: $(INSTALLED) ## Random faults on a real server, each followed by a proof (MINUTES=10, SEED=0)
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) --seed $(or $(SEED),0)

demo: $(INSTALLED) ## Two processes, one copy of the weights: serve, train in place, prove it
	@$(BIN)/bridge demo

compare: $(INSTALLED) ## The demo's task by every mode: sync time, memory and reward in one table
	@$(BIN)/python -m benchmarks.compare

bench: $(INSTALLED) ## Run every benchmark but same_steps and two_trees, which compare two checkouts (hours, on a GPU)
	@for name in $(filter-out same_steps two_trees,$(basename $(notdir $(wildcard benchmarks/[a-z]*.py)))); do \
		echo "== $$name"; $(BIN)/python -m "benchmarks.$$name"; done

docs: $(INSTALLED) ## The docs as a site: site/index.html
	@$(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --editable '.[docs]' >> $(LOG) 2>&1
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Remove what can be made again; .venv and runs/ stay
	@rm -rf build dist site .contract .pytest_cache .mypy_cache .ruff_cache .import_linter_cache ./*.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	@say() { echo "setup: $$*"; echo "== $$*" >> $(LOG); }
	log() { "$$@" >> $(LOG) 2>&1; }
	fail() { tail -n 25 $(LOG) >&2; echo "error: $$*; the whole log is $(LOG)" >&2; exit 1; }
	fits='import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})'
	python=
	for candidate in $(or $(PYTHON),python3.12 python3.11 python3 python); do
		if "$$candidate" -c "$$fits" > /dev/null 2>&1; then python=$$candidate; break; fi
	done
	if [ -z "$$python" ]; then
		echo "error: no Python 3.11 or 3.12 with venv among: $(or $(PYTHON),python3.12 python3.11 python3 python)" >&2
		echo "hint: install one (Debian and Ubuntu: apt install python3 python3-venv), or: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2
		exit 1
	fi
	"$$python" -m venv $$([ -e $@ ] || echo --clear) $(VENV)
	pip="$(BIN)/python -m pip --disable-pip-version-check --no-input"
	say "$$($(BIN)/python --version) in $(VENV), for the $(EXTRA); log: $(LOG)"
	log $$pip install --upgrade pip || fail "pip could not be upgraded"
	if [ "$(EXTRA)" = cpu ]; then
		say "$(TORCH_CPU), from where pip finds it (about 200 MB)"
		log $$pip install "$(TORCH_CPU)" || {
			say "$(TORCH_CPU), from $(TORCH_CPU_INDEX)"
			log $$pip install "$(TORCH_CPU)" --extra-index-url $(TORCH_CPU_INDEX) || fail "no $(TORCH_CPU) could be installed"
		}
	fi
	say "vLLM, Bridge and the development tools (about 1 GB, a minute or two)"
	log $$pip install --editable '.[$(EXTRA),dev]' || fail "the packages could not be installed"
	packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	cp cli/bridge_editable.py "$$packages"
	echo 'import bridge_editable; bridge_editable.install()' > "$$packages/bridge_editable.pth"
	if ! log $(BIN)/python -c 'import torchvision'; then
		say "torchvision is broken beside this torch, and text models need none: removing it"
		log $$pip uninstall --yes torchvision torchaudio torchcodec || fail "a broken torchvision could not be removed"
	fi
	touch $@
	say "done"

$(TINKER)/.installed: $(INSTALLED)
	@$(BIN)/python -m venv $$([ -e $@ ] || echo --clear) $(TINKER)
	$(TINKER)/bin/python -m pip --disable-pip-version-check --no-input install --quiet "$(TINKER_RELEASE)" numpy
	touch $@

$(VERIFIERS)/.installed: $(INSTALLED)
	@say() { echo "verifiers: $$*"; }
	log=$(VERIFIERS)/setup.log
	fail() { tail -n 25 $$log >&2; echo "error: $$*; the whole log is $$log" >&2; exit 1; }
	$(BIN)/python -m venv $$([ -e $@ ] || echo --clear) $(VERIFIERS)
	pip="-m pip --disable-pip-version-check --no-input install"
	say "$(VERIFIERS_RELEASE) and uv in $(VERIFIERS), a minute or two (about 800 MB); log: $$log"
	$(VERIFIERS)/bin/python $$pip "$(VERIFIERS_RELEASE)" uv >> $$log 2>&1 || fail "verifiers could not be installed"
	say "Reasoning Gym in $(VENV)"
	$(BIN)/python $$pip --editable '.[gym]' >> $$log 2>&1 || fail "Reasoning Gym could not be installed"
	touch $@
	say "done"
