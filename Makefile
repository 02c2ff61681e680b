# `make help` lists the targets. VENV, PYTHON and OUTPUT can be set on the command line.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
OUTPUT ?= demo-output
# -qq: errors only
INSTALL_FLAGS ?= -qq --disable-pip-version-check
PYTEST_FLAGS ?= -q
# A file's tests stay in one process, with the worlds of workers that they share. tests/conftest.py orders the files.
# As many as the cores that the figures in docs/design.md are of.
PYTEST_JOBS ?= 2
PYTEST_SHARED := -n $(PYTEST_JOBS) --dist loadfile --no-loadscope-reorder
# What stands on numpy alone, commands, and a save and a load in one process and on two ranks.
FAST_TESTS := tests/algebra tests/catalog tests/planning tests/aoa tests/transfer tests/native tests/golden tests/cli \
	tests/loading/test_policies.py tests/distributed/test_save_load.py tests/test_import.py tests/test_mirror.py
# Of these, what takes longest: processes that are killed and go on, and whole loads behind a rehearsal.
NOT_FAST := tests/cli/test_script.py tests/cli/test_convert.py tests/transfer/test_object_reads.py

# Bytecode is kept, whatever the machine says: hundreds of processes would each compile the same modules.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install $(INSTALL_FLAGS)
# What an installation depends on: when one of these changes, the next target installs again.
METADATA := setup.py pyproject.toml paddle_flexckpt/_version.py

# PaddleNLP needs NumPy 1.26, and many packages besides.
NLP_VENV ?= .venv-paddlenlp

VENV_STAMP := $(VENV)/.stamp-venv
NLP_STAMP := $(NLP_VENV)/.stamp
# PaddleFormers and PaddleNLP want other versions of the same packages.
FORMERS_VENV ?= .venv-paddleformers
FORMERS_STAMP := $(FORMERS_VENV)/.stamp
# mutmut brings a user interface, and needs Python 3.10.
MUTATION_VENV ?= .venv-mutation
MUTATION_STAMP := $(MUTATION_VENV)/.stamp
# Measures lines and branches, for one target: beside the environment, which is as it was then.
COVERAGE_DIR ?= .venv-coverage
COVERAGE_STAMP := $(COVERAGE_DIR)/.stamp
COVERED ?= 400
# torch, safetensors, Orbax and jax, which have no place beside Paddle.
BENCH_VENV ?= .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.stamp
BENCH_PEERS ?= torch==2.13.* safetensors orbax-checkpoint jax numpy
# torch, Megatron-Core and DeepSpeed on CPUs, which write checkpoints for the tests of their readers.
TORCH_VENV ?= .venv-torch
TORCH_STAMP := $(TORCH_VENV)/.stamp
TORCH_WRITERS ?= megatron-core==0.16.* deepspeed==0.19.*
TORCH_TESTS := $(addprefix tests/foreign/test_,torch_dcp.py torch_layouts.py dcp_chunks.py torch_saving.py dcp_safetensors.py megatron.py deepspeed.py) \
	tests/tools/test_dcp_target.py tests/aoa/test_families.py
# vLLM on CPUs, which serves weights that a trainer pushes.
ENGINE_VENV ?= .venv-engine
ENGINE_STAMP := $(ENGINE_VENV)/.stamp
# mkdocs and its theme, which read the code but do not import Paddle.
DOCS_VENV ?= .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.stamp
DEMO_STAMP := $(VENV)/.stamp-demo
TEST_STAMP := $(VENV)/.stamp-test

.PHONY: help
help: ## print this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "make %-19s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: $(DEMO_STAMP) ## train, checkpoint and reshard a small language model; results in demo-output/
	@echo "[make] running the demo, output in $(OUTPUT)"
	@$(BIN)/python examples/tensor_parallel_lm/run.py --output $(OUTPUT)

.PHONY: test-fast
test-fast: $(TEST_STAMP) ## run the tests of the floor, of planning, and of a save and a load, in a minute
	@echo "[make] running the fast tests"
	@HYPOTHESIS_PROFILE=brief $(BIN)/python -m pytest $(PYTEST_FLAGS) $(PYTEST_SHARED) -m "not slow" $(FAST_TESTS) $(addprefix --ignore=,$(NOT_FAST))

.PHONY: test
test: $(TEST_STAMP) ## run all tests but the slow ones: every kind of proof, in some fifteen minutes
	@echo "[make] running the tests"
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) $(PYTEST_SHARED) -m "not slow" tests

.PHONY: test-all
test-all: $(TEST_STAMP) ## run all tests, before a release
	@echo "[make] running all tests"
	@HYPOTHESIS_PROFILE=release $(BIN)/python -m pytest $(PYTEST_FLAGS) $(PYTEST_SHARED) tests

.PHONY: test-full
test-full: $(TEST_STAMP) ## run all tests with the long searches of the property tests
	@echo "[make] running all tests with the Hypothesis profile 'full'"
	@HYPOTHESIS_PROFILE=full $(BIN)/python -m pytest $(PYTEST_FLAGS) $(PYTEST_SHARED) tests

.PHONY: test-matrix
test-matrix: $(TEST_STAMP) ## save under every parallel strategy and load under every other, and from and to stock Paddle; results in matrix.json
	@echo "[make] running the matrix of strategies"
	@$(BIN)/python -m tests.distributed.matrix.table --json matrix.json
	@echo "[make] two-way with stock Paddle, under each strategy"
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/distributed/test_paddle_format.py
	@echo "[make] layouts of Muon against each other and those of other optimizers, and through a trainer's resume"
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/distributed/test_muon.py tests/paddlefleet/test_muon.py

.PHONY: test-rehearsals
test-rehearsals: $(TEST_STAMP) ## compare what is rehearsed with what real ranks describe and count, for every pair of strategies; results in rehearsals.json
	@echo "[make] rehearsals against real ranks"
	@$(BIN)/python -m tests.distributed.matrix.rehearsals --json rehearsals.json

.PHONY: test-semi-auto
test-semi-auto: $(TEST_STAMP) ## train semi-automatic strategies, and load each from every other and from fleet's; results in semi-auto-matrix.json
	@echo "[make] each strategy against one process"
	@$(BIN)/python -m tests.semi_auto.training
	@echo "[make] each strategy loaded from every other"
	@$(BIN)/python -m tests.semi_auto.matrix --json semi-auto-matrix.json
	@echo "[make] fused parameters between semi-automatic and fleet's strategies"
	@$(BIN)/python -m tests.semi_auto.fused_matrix --json fused-matrix.json

.PHONY: test-trainer
test-trainer: $(NLP_STAMP) ## run the tests and the matrix of strategies through the trainer of PaddleNLP, in an environment of its own
	@echo "[make] tests of the trainer of PaddleNLP"
	@$(NLP_VENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/trainer tests/patching/test_trainers.py
	@echo "[make] the trainer's strategies against each other"
	@$(NLP_VENV)/bin/python -m tests.trainer.matrix --json trainer-matrix.json

.PHONY: test-paddleformers
test-paddleformers: $(FORMERS_STAMP) ## run the tests through the trainer of PaddleFormers, in an environment of its own
	@echo "[make] tests of the trainer of PaddleFormers"
	@$(FORMERS_VENV)/bin/python -m pytest $(PYTEST_FLAGS) tests/paddleformers tests/trainer/test_model_rules_paddleformers.py

.PHONY: test-torch
test-torch: $(TEST_STAMP) $(TORCH_STAMP) ## have torch, Megatron-Core and DeepSpeed write checkpoints, and read them; have torch load ours; in an environment of its own
	@echo "[make] checkpoints of torch, Megatron-Core and DeepSpeed"
	@FLEXCKPT_TORCH_PYTHON=$(abspath $(TORCH_VENV))/bin/python $(BIN)/python -m pytest $(PYTEST_FLAGS) $(TORCH_TESTS)

.PHONY: test-rollout
test-rollout: $(TEST_STAMP) $(ENGINE_STAMP) ## push weights to engines of vLLM on one and two ranks, in an environment of its own
	@echo "[make] weights that reach a serving engine"
	@FLEXCKPT_VLLM_PYTHON=$(abspath $(ENGINE_VENV))/bin/python $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/rollout

.PHONY: test-device
test-device: $(TEST_STAMP) $(NLP_STAMP) ## run the suites with a simulated device current, and the matrix of strategies on 2 and 4 of them; results in device-matrix.json
	@echo "[make] tests on the device"
	@$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/device
	@echo "[make] suites for the host, with a device current"
	@$(BIN)/python -m tests.device.suites
	@echo "[make] the trainer of PaddleNLP on a device"
	@$(NLP_VENV)/bin/python -m tests.device.suites tests/trainer/test_trainer.py
	@echo "[make] the matrix of strategies on devices"
	@$(BIN)/python -m tests.device.matrix --json device-matrix.json

.PHONY: test-aoa
test-aoa: $(TEST_STAMP) ## run 100,000 random AOA programs against an oracle on whole arrays
	@echo "[make] the AOA compiler against its oracle"
	@$(BIN)/python -m tests.aoa.differential --count 100000 --jobs 2

.PHONY: test-damage
test-damage: $(TEST_STAMP) ## damage a checkpoint 10,000 times; all of it has to be found, located and refused
	@echo "[make] random damage to a checkpoint with one copy of everything"
	@$(BIN)/python -m tests.damage.campaign --count 10000 --jobs 2
	@echo "[make] random damage to a checkpoint with two"
	@$(BIN)/python -m tests.damage.campaign --count 3000 --replicas 2 --jobs 2
	@echo "[make] flipped bits under other layouts"
	@$(BIN)/python -m tests.damage.layouts --flips 500

.PHONY: test-silence
test-silence: $(TEST_STAMP) ## run 10,000 random strategies and callers' mistakes: each ends bit-equal or in an error
	@echo "[make] the campaign against silence"
	@$(BIN)/python -m tests.silence.campaign --count 10000 --jobs 2

# Which rooms, and how many mutants of each: 0 for all.
ROOMS ?= planning transfer
MUTANTS ?= 0

.PHONY: test-mutation
test-mutation: $(MUTATION_STAMP) ## change ROOMS in MUTANTS small ways (0: all); a test has to notice each
	@echo "[make] mutants of $(ROOMS)"
	@$(MUTATION_VENV)/bin/python -m tests.mutation.run --sample $(MUTANTS) $(ROOMS)

FUZZ_SECONDS ?= 300

.PHONY: fuzz
fuzz: $(TEST_STAMP) ## search for bytes that readers choke on, for FUZZ_SECONDS; what it finds goes to tests/attacks/corpus
	@echo "[make] fuzzing for $(FUZZ_SECONDS) s"
	@$(BIN)/python -m tests.attacks.fuzz --seconds $(FUZZ_SECONDS) --jobs 2 --distil

.PHONY: test-crash
test-crash: $(TEST_STAMP) ## stop saves before each of their calls on files, cut the power, fail each call: all points
	@echo "[make] crash points"
	@$(BIN)/python -m tests.crash.enumerate --jobs 2

# So many moments, drawn from a seed.
KILLS ?= 200
KILLS_SEED ?= 0

.PHONY: test-kills
test-kills: $(TEST_STAMP) ## kill or stop a process of a save, trainer or writer, at KILLS moments drawn from KILLS_SEED; signal whole jobs
	@echo "[make] kills of real processes"
	@$(BIN)/python -m tests.background.kills --seed $(KILLS_SEED) --count $(KILLS)
	@$(BIN)/python -m tests.manager.group_signals --seed $(KILLS_SEED) --count 50

# On each file system, and in each of ext4's modes.
STATES ?= 2000

.PHONY: test-filesystems
test-filesystems: $(TEST_STAMP) ## cut the power under ext4, XFS and btrfs, STATES times each; needs root, xfsprogs and btrfs-progs
	@echo "[make] crash states of real file systems"
	@$(BIN)/python -m tests.filesystems.campaign --states $(STATES) --jobs 2
	@for kind in data directory manifest; do \
		echo "[make] without the fsync of $$kind, which has to be found"; \
		$(BIN)/python -m tests.filesystems.campaign --states 40 --jobs 2 --only "manager: one goes, 1" --left-out $$kind || exit 1; \
	done

SEEDS ?= 1000
FIRST ?= 0
.PHONY: test-simulation
test-simulation: $(TEST_STAMP) ## simulate SEEDS clusters from seed FIRST on: jobs, faults, restarts, with the library's own code
	@echo "[make] simulated clusters"
	@$(BIN)/python -W ignore -m tests.simulation.run --seeds $(SEEDS) --first $(FIRST) --jobs 2

.PHONY: coverage-simulation
coverage-simulation: $(COVERAGE_STAMP) $(TEST_STAMP) ## simulate COVERED clusters; lines and branches of four rooms that they run, and those they do not
	@PYTHONPATH=$(COVERAGE_DIR) $(BIN)/python -W ignore -m tests.simulation.coverage --seeds $(COVERED) --jobs 2

.PHONY: test-mistakes
test-mistakes: $(TEST_STAMP) ## make each of the seeded mistakes, and count the simulated seeds until it is found
	@echo "[make] seeded mistakes"
	@$(BIN)/python -W ignore -m tests.simulation.run --mistake all --seeds 10000 --jobs 2

# Which versions: "3.9 3.10 3.11 3.12 3.13" for all that are supported.
DIST_PYTHONS ?= $(PYTHON)

.PHONY: dist
dist: ## make the wheel and the source distribution in dist/, check them, and use them in fresh environments, with README's first example
	@PYTHON=$(PYTHON) PYTHONS="$(DIST_PYTHONS)" bash .ci/dist

.PHONY: extras-table
extras-table: ## install each extra in an environment of its own; their packages, sizes and minutes
	@$(PYTHON) -m benchmarks.extras

.PHONY: environment
environment: $(TEST_STAMP) ## make the environment of the tests, and run nothing

.PHONY: lint
lint: $(TEST_STAMP) ## check style, types and import contracts
	@echo "[make] ruff check"
	@$(BIN)/python -m ruff check .
	@echo "[make] ruff format --check"
	@$(BIN)/python -m ruff format --check .
	@echo "[make] mypy"
	@$(BIN)/python -m mypy
	@echo "[make] lint-imports"
	@$(BIN)/lint-imports

.PHONY: format
format: $(TEST_STAMP) ## rewrite the sources in the format that lint asks for
	@$(BIN)/python -m ruff check --fix-only .
	@$(BIN)/python -m ruff format .

# Which parts: all if it is empty; `python -m benchmarks.run --help` lists them.
BENCH ?=

.PHONY: bench
bench: $(TEST_STAMP) $(BENCH_STAMP) ## measure BENCH, or everything, against the medium, Paddle's own, torch DCP, Orbax and others; results in bench-output/
	@$(BIN)/python -m benchmarks.run $(BENCH) --peers $(BENCH_VENV)/bin/python

# What a GPU machine without a network lacks, and the interpreter, of the version that it has, for the rehearsal.
GPU_KIT ?= gpu-kit
KIT_PYTHON ?= python3.12

.PHONY: gpu-kit
gpu-kit: $(VENV_STAMP) ## pack Paddle's CPU wheel and others into gpu-kit/, for a GPU machine without a network; prints the parts' sizes
	@echo "[make] filling $(GPU_KIT)"
	@$(BIN)/python tests/device/gpu/pack.py fill $(GPU_KIT)

.PHONY: gpu-rehearsal
gpu-rehearsal: ## run all that is to be run on a GPU machine, from an empty directory, on the simulated runtime, without a network
	@echo "[make] rehearsing the steps of $(GPU_KIT)"
	@PYTHON=$(KIT_PYTHON) tests/device/gpu/rehearse.sh $(GPU_KIT)

.PHONY: docs
docs: $(DOCS_STAMP) ## make the documentation a site, with references of names and commands; in build/site/
	@echo "[make] making the site"
	@$(DOCS_VENV)/bin/python docs/site.py build/site-source
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet

.PHONY: test-site
test-site: $(TEST_STAMP) docs ## make the site, then type queries into its search and look at its pages in Chromium
	@echo "[make] the site in a browser"
	@FLEXCKPT_SITE=build/site $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/docs

.PHONY: clean
clean: ## remove outputs, caches and the virtual environment
	@rm -rf demo-output bench-output mutation-output log build dist paddle_flexckpt.egg-info
	@rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	@if [[ -f "$(VENV)/pyvenv.cfg" ]]; then rm -rf "$(VENV)"; fi

# One virtual environment serves every target; each stamp marks a finished installation in it.

$(VENV_STAMP):
	@echo "[make] creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(NLP_STAMP): $(METADATA)
	@echo "[make] creating $(NLP_VENV) with PaddleNLP"
	@$(PYTHON) -m venv $(NLP_VENV)
	@$(NLP_VENV)/bin/python -m pip install $(INSTALL_FLAGS) -e '.[cpu,paddlenlp]' pytest hypothesis
	@touch $@

$(FORMERS_STAMP): $(METADATA)
	@echo "[make] creating $(FORMERS_VENV) with PaddleFormers"
	@$(PYTHON) -m venv $(FORMERS_VENV)
	@$(FORMERS_VENV)/bin/python -m pip install $(INSTALL_FLAGS) -e '.[cpu,paddleformers]' pytest hypothesis
	@$(FORMERS_VENV)/bin/python -m pip install $(INSTALL_FLAGS) 'pyarrow<23'
	@touch $@

$(MUTATION_STAMP): $(METADATA)
	@echo "[make] creating $(MUTATION_VENV) with mutmut"
	@$(PYTHON) -m venv $(MUTATION_VENV)
	@$(MUTATION_VENV)/bin/python -m pip install $(INSTALL_FLAGS) -e '.[cpu,test,mutation]'
	@touch $@

$(COVERAGE_STAMP): $(VENV_STAMP)
	@echo "[make] installing coverage into $(COVERAGE_DIR)"
	@$(PIP_INSTALL) --upgrade --target $(COVERAGE_DIR) 'coverage>=7.10,<8'
	@touch $@

$(BENCH_STAMP):
	@echo "[make] creating $(BENCH_VENV) with $(BENCH_PEERS)"
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_VENV)/bin/python -m pip install $(INSTALL_FLAGS) $(BENCH_PEERS)
	@touch $@

$(TORCH_STAMP):
	@echo "[make] creating $(TORCH_VENV) with torch and $(TORCH_WRITERS)"
	@$(PYTHON) -m venv $(TORCH_VENV)
	@$(TORCH_VENV)/bin/python -m pip install $(INSTALL_FLAGS) 'torch==2.13.*' 'transformers==5.23.*' numpy safetensors setuptools wheel
	@# Without its own kernels, which need a compiler of CUDA; its build asks torch.
	@DS_BUILD_OPS=0 $(TORCH_VENV)/bin/python -m pip install $(INSTALL_FLAGS) --no-build-isolation $(TORCH_WRITERS)
	@touch $@

$(ENGINE_STAMP): tests/rollout/install_engine
	@echo "[make] creating $(ENGINE_VENV) with vLLM"
	@PYTHON="$(PYTHON)" INSTALL_FLAGS="$(INSTALL_FLAGS)" tests/rollout/install_engine $(ENGINE_VENV)
	@touch $@

$(DOCS_STAMP): $(METADATA)
	@echo "[make] creating $(DOCS_VENV) with mkdocs"
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install $(INSTALL_FLAGS) -e '.[docs]'
	@touch $@

$(DEMO_STAMP): $(METADATA) | $(VENV_STAMP)
	@echo "[make] installing the package with Paddle (CPU) and matplotlib"
	@$(PIP_INSTALL) -e '.[cpu,viz]'
	@touch $@

$(TEST_STAMP): $(METADATA) | $(VENV_STAMP)
	@echo "[make] installing the package with Paddle (CPU) and the test tools"
	@$(PIP_INSTALL) -e '.[cpu,test]'
	@touch $@
