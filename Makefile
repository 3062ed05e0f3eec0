# `make demo` and `make test` each do everything on a fresh machine: environment, installation, the job.
PYTHON ?= python3
VENV := .venv
# Empty without an NVIDIA GPU. With one, PyTorch comes from PyPI, with CUDA and the Triton that belongs to it.
GPU ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
# Beside a GPU, a PyTorch without CUDA, however it came into $(VENV), makes the installation run again.
ifneq ($(GPU),)
TORCH_VERSION := $(wildcard $(VENV)/lib/python3*/site-packages/torch/version.py)
STALE := $(shell grep -qs "^cuda.*= '" $(TORCH_VERSION) /dev/null || rm -f $(VENV)/.installed $(VENV)/.installed-gpu)
endif
# Where pip finds PyTorch without CUDA, a tenth of the size, for machines without a GPU.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := $(VENV)/bin
DEMO_OUT ?= runs/demo

# Other implementations, at the versions behind the figures in docs/benchmarks.md. They get an environment on top of
# the project's, so that importing them changes nothing elsewhere.
PEERS := .venv-peers
PEER_PACKAGES := mmasim==2.1.1 torchao==0.18.0 compressed-tensors==0.20.0 fouroversix==1.0.5 loguru psutil \
  nvidia-modelopt==0.47.0 omegaconf==2.4.0 pulp==3.3.2 scipy==1.17.1 nvidia-ml-py==13.615.71 requests==2.34.2 \
  urllib3==2.8.0 certifi==2026.10.19.post1 charset-normalizer==3.5.3
# Training loops that fourbits.integrations connects, with what they import; torchtitan's list is the longest.
LOOP_PACKAGES := lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0 peft==0.21.2 trl==1.16.0 \
  torchtitan==0.3.0 torchdata==0.11.0 torch_checkpointing==0.1.1 spmd_types==0.2.3 einops==0.8.2 tyro==1.0.17 \
  docstring-parser==0.18.0 typeguard==4.6.1 tensorboard==2.21.0 tensorboard-data-server==0.7.2 protobuf==7.36.2 \
  absl-py==2.5.1 grpcio==1.85.3 werkzeug==3.1.9 markdown==3.11.3

# Models whose conversion is tested besides those of transformers; tests import timm without torchvision.
MODEL_PACKAGES := timm==1.0.31 diffusers==0.42.1 importlib_metadata==10.2.0 zipp==4.1.2

# lm-evaluation-harness, with what it imports.
EVAL_PACKAGES := lm-eval==0.4.13 evaluate==0.4.6 rouge_score==0.1.2 sacrebleu==2.6.0 scikit-learn==1.9.1 \
  pytablewriter==0.38.0 sqlitedict==2.1.0 word2number==1.1 DataProperty==0.37.0 dominate==2.9.1 joblib==1.6.0 \
  msgfy==0.2.1 narwhals==2.29.0 pathvalidate==3.3.1 mbstrdecoder==1.1.5 tabledata==0.0.26 tabulate==0.10.0 \
  threadpoolctl==3.8.0 colorama==0.4.6 Logbook==1.10.1 lxml==6.1.3 nltk==3.10.4 portalocker==4.4.2 \
  aiohttp==3.14.5 chardet==6.0.0.post1 cloudpickle==3.1.3 pytz==2026.6 defusedxml==0.7.1 typepy==0.3.1 \
  aiohappyeyeballs==2.7.1 aiosignal==1.4.0 attrs==26.1.0 frozenlist==1.8.0 multidict==7.2.1 propcache==0.5.4 \
  yarl==1.25.1 six==1.17.0

.PHONY: docs help demo test check test-gpu sanitize test-peers bench clean install
.DEFAULT_GOAL := help

help:
	@echo "make install   make $(VENV), with CUDA if there is an NVIDIA GPU (GPU= or GPU=yes overrides)"
	@echo "make demo      train a tiny model, and report what each technique of NVFP4 fixes; writes $(DEMO_OUT)/report.html"
	@echo "make test      run the tests"
	@echo "make check     lint, types and layers, in seconds"
	@echo "make test-gpu  run the tests that need a CUDA device, and compute-sanitizer if installed (make sanitize)"
	@echo "make test-peers compare with torchao, compressed-tensors, modelopt and fouroversix, and train in the loops of"
	@echo "                Lightning, PEFT, TRL and torchtitan, and evaluate with lm-evaluation-harness, in an environment of"
	@echo "                their own; then the slow tests: kernels built for more GPUs, kills, small disks"
	@echo "make docs      build the documentation into site/, in an environment of its own"
	@echo "make bench     print the speed of quantizers, linear layers, sums, the scan, training steps and data"
	@echo "make clean     remove caches and build products (the environment and runs stay)"

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "fourbits: $(PYTHON) not found; install Python 3.11 or newer, or run make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fourbits: needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1); run make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "fourbits: $(PYTHON) cannot make an environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

ifeq ($(GPU),)
# torch first and by itself, so that only torch is looked up in TORCH_INDEX and no CUDA package comes along.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (once; PyTorch for CPU and its tools, a few minutes)"
	@$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt --extra-index-url $(TORCH_INDEX) torch
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
else
$(VENV)/.installed: $(VENV)/.installed-gpu
	@touch $@
endif

# constraints.txt pins the CPU's torch and triton; here PyPI's torch brings its own. One without CUDA has to go first.
$(VENV)/.installed-gpu: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into $(VENV) (once; PyTorch with CUDA and its tools, a few minutes)"
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null || \
	  $(BIN)/python -m pip uninstall --quiet --yes torch triton 2>/dev/null
	@grep -vE '^(torch|triton)==' constraints.txt > $(VENV)/constraints-gpu.txt
	@$(BIN)/python -m pip install --quiet -c $(VENV)/constraints-gpu.txt -e '.[dev]'
	@touch $@

install: $(VENV)/.installed

demo: install
	$(BIN)/fourbits demo --out $(DEMO_OUT)

# One worker per core, at most 8; each starts with its own part of the files, whose compiled code it then reuses.
TEST_JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n > 8 ? 8 : n)))

test: install
	$(BIN)/pytest -q -n $(TEST_JOBS) --dist worksteal

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/pytest -q tests/test_layers.py tests/test_style.py

# In parallel, because tests mostly compile: half of the cores, at most 16 (each holds some GB of GPU memory).
GPU_JOBS ?= $(shell n=$$(($$(nproc) / 2)); echo $$((n < 1 ? 1 : n > 16 ? 16 : n)))

# Models at full width run alone, because two of them with other tests would fill 80 GB. A failure stops nothing.
LARGE := tests/model/test_full_width.py
test-gpu: $(VENV)/.installed-gpu
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "fourbits: the torch in $(VENV) finds no CUDA device; if nvidia-smi does, torch may lack CUDA:" \
	  "remove $(VENV) and run make test-gpu again" >&2; exit 1; }
	@failed=0; \
	$(BIN)/pytest -q -m gpu -n $(GPU_JOBS) --continue-on-collection-errors --ignore $(LARGE) || failed=1; \
	$(BIN)/pytest -q -m gpu $(LARGE) || failed=1; \
	$(MAKE) --no-print-directory sanitize || failed=1; \
	exit $$failed

# Every kernel under compute-sanitizer, split into shares that run in parallel.
sanitize: $(VENV)/.installed-gpu
	@if ! command -v compute-sanitizer >/dev/null; then \
	  echo "fourbits: compute-sanitizer not found (it is part of the CUDA toolkit): its cases are skipped" >&2; exit 0; \
	fi; \
	export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=tests; \
	failed=0; shares=; \
	for share in $$(seq 0 $$(($(GPU_JOBS) - 1))); do \
	  compute-sanitizer --error-exitcode 9 $(BIN)/python -m gpu.sanitized $$share $(GPU_JOBS) & \
	  shares="$$shares $$!"; \
	done; \
	for share in $$shares; do wait $$share || failed=1; done; \
	exit $$failed

$(PEERS)/.installed: Makefile $(VENV)/.installed
	@$(BIN)/python -m venv $(PEERS)
	@$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	  > $$($(PEERS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/project.pth
	@$(PEERS)/bin/python -m pip install --quiet 'setuptools>=77' wheel
	@SKIP_CUDA_BUILD=1 $(PEERS)/bin/python -m pip install --quiet --no-deps --no-build-isolation \
	  $(PEER_PACKAGES) $(LOOP_PACKAGES) $(MODEL_PACKAGES) $(EVAL_PACKAGES)
	@touch $@

test-peers: $(PEERS)/.installed
	$(PEERS)/bin/python -m pytest -q -m peers tests/peers tests/test_integrations_page.py
	$(BIN)/pytest -q -m slow -n $(TEST_JOBS) --dist worksteal

# mkdocs reads the sources without importing them, so its environment needs neither torch nor the project.
DOCS := .venv-docs
DOCS_PACKAGES := mkdocs==1.6.1 mkdocs-material==9.8.2 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11 ruff==0.17.6
$(DOCS)/.installed: Makefile
	@$(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet $(DOCS_PACKAGES)
	@touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "open site/index.html"

bench: install
	$(BIN)/fourbits bench quantize
	$(BIN)/fourbits bench sums
	$(BIN)/fourbits bench linear
	$(BIN)/fourbits bench ssd
	$(BIN)/fourbits bench step
	$(BIN)/fourbits bench data

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
