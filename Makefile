# make demo       a small model learns arithmetic by GRPO on this machine, set-up included (no GPU needed);
#                 SEED=43 make demo for another seed
# make demo-sft   the same model by SFT and then DPO
# make test       lint, types and every CPU test, set-up included; two processes at a time, TEST_PROCESSES=4 for four
# make test-fast  the CPU tests that start no other processes and train no models, in a minute or two
# make test-models every family of models with an engine and over two ranks; writes benchmarks/results/models.json and the
#                 table of docs/reference/models.md. ONLY="gemma2 or olmoe" make test-models for rows with one of these in their names
# make test-gpu   tests that need a GPU (see README.md for its set-up); GPU_TESTS="FILES -k NAMES" for an area of
#                 docs/contributing.md
# make house      prints figures of the structure: imports, sizes, ways to the model; an error if one is above its limit
# make setup      the virtual environment .venv for a machine without a GPU
# make setup-gpu  the same for a machine with GPUs; what must be compiled is compiled once and kept (requirements/build.py)
# make mamba      kernels of Mamba-2 (Nemotron-H, Falcon-H1, Granite 4); compiled once (nvcc, a long time)
# make flash-attn FlashAttention, which Transformer Engine may use instead of cuDNN's; compiled once (nvcc, a long time)
# make image      the container image (Dockerfile), with all of that
# make docs       the documents as a site in docs/_build; warnings and broken links are errors
# make lock       make requirements/*.txt anew from pyproject.toml

SHELL := /bin/bash
UV := .tools/bin/uv
PYTHON := .venv/bin/python
SEED ?= 42
TEST_PROCESSES ?= 2
GPU_TESTS ?=
# A process of tests that crashes ends the tests at once: with --dist loadscope xdist would wait for ever for its tests.
PYTEST := $(PYTHON) -m pytest --numprocesses $(TEST_PROCESSES) --max-worker-restart 0 --dist loadscope --no-loadscope-reorder
# The newest Python 3.12 of pyenv, else one on the PATH that really runs (a pyenv shim of an inactive version does not),
# else none: uv then looks for one itself.
PYTHON312 := $(shell for candidate in $$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12.*/bin/python 2>/dev/null \
	| sort -rV) $$(command -v python3.12); do "$$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' \
	2>/dev/null && echo "$$candidate" && break; done)
LOCK := $(UV) pip compile pyproject.toml -c requirements/constraints.in --python-version 3.12 --no-annotate \
	--no-emit-index-url --quiet

IMAGE ?= nemo-offload-rl:latest
BUILD = $(PYTHON) requirements/build.py --pip .tools/bin/python --uv $(UV) $(BUILD_ARGUMENTS)

# Where it is set, as in many images, each process of tests would compile all modules and rewrite all assertions again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-sft test lint house test-cpu test-fast test-models test-gpu setup setup-gpu flash-attn mamba image docs lock clean

demo: setup
	$(PYTHON) examples/demo/run.py --seed $(SEED)

demo-sft: setup
	rm -rf runs/sft_demo
	$(PYTHON) examples/demo/make_model.py --output runs/sft_demo/random --seed $(SEED)
	$(PYTHON) examples/demo/demonstrations.py --output runs/sft_demo/data --seed $(SEED)
	$(PYTHON) examples/run_sft.py --config examples/configs/sft_arithmetic_cpu.yaml
	$(PYTHON) examples/run_dpo.py --config examples/configs/dpo_arithmetic_cpu.yaml
	$(PYTHON) examples/demo/grade.py runs/sft_demo/*/step_*/hf --seed $(SEED)

test: lint test-cpu

lint: setup
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/codespell
	.venv/bin/pyright

house:
	$(PYTHON) tests/support/house.py
	$(PYTHON) -m pytest -q -s tests/functional/test_grpo_devices.py -k ways

test-cpu: setup
	$(PYTEST) -m "not gpu and not models" --durations=15 --durations-min=10

test-fast: setup
	$(PYTEST) -m "not gpu and not models and not processes and not trains"

test-models: setup
	ONLY="$(ONLY)" MODELS_RESULTS=benchmarks/results/models.json $(PYTEST) tests/unit/models/test_matrix.py \
		-k "split or (served and ($(or $(ONLY),family)))"
	$(PYTEST) tests/unit/policy/test_worker_layerwise.py tests/unit/backends/dtensor/test_state_mixers.py \
		-m models -k "$(or $(ONLY),test)"
	$(PYTHON) tests/support/models_page.py

test-gpu:
	python3 -m pytest -m gpu --durations=0 --durations-min=5 $(GPU_TESTS)

setup: .venv/.cpu

setup-gpu: .venv/.transformer_engine

flash-attn: .venv/.flash_attn

mamba: .venv/.causal_conv1d .venv/.mamba_ssm

.venv/.transformer_engine .venv/.flash_attn .venv/.causal_conv1d .venv/.mamba_ssm: .venv/.%: requirements/%.txt requirements/build.py .venv/.gpu
	$(BUILD) $*
	touch $@

docs: setup
	$(PYTHON) -m sphinx --fresh-env --write-all --fail-on-warning --keep-going --quiet --builder html docs docs/_build
	@echo docs/_build/index.html

image:
	docker build --tag $(IMAGE) .

.venv/.%: requirements/%.txt requirements/megatron.txt pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing --no-project --python "$(or $(PYTHON312),3.12)" .venv
	@echo "installing torch, vLLM, Ray and others into .venv; this shows nothing, and takes minutes"
	$(UV) pip install --quiet --python $(PYTHON) --no-deps --compile-bytecode -r requirements/$*.txt -r requirements/megatron.txt
	$(UV) pip install --quiet --python $(PYTHON) --no-deps --editable .
	touch $@

$(UV):
	python3 -m venv .tools
	.tools/bin/python -m pip install --quiet uv==0.13.8

lock: $(UV)
	$(LOCK) --extra cpu --extra dev -o requirements/cpu.txt
	$(LOCK) --extra gpu --extra transformer-engine --extra dev --no-emit-package transformer-engine-torch -o requirements/gpu.txt

clean:
	rm -rf .venv .tools runs docs/_build .pytest_cache .ruff_cache .hypothesis
