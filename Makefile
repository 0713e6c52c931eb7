# make demo   from a fresh clone to a trained Llama
# make quick  lint, types and fast tests of every package   make test   lint, types and the whole suite
VENV ?= .venv
PYTHON ?= python3
OLDEST_PYTHON ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
# Tests of one file run in one process, because they share fixtures; tests/conftest.py puts long files first.
# Three on two cores: tests that wait for Slurm, a timeout or the disk leave a core to the others.
PARALLEL = -n 3 --dist loadfile --no-loadscope-reorder
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check

.PHONY: demo check quick test docs gpu peers-gpu parity planner-accuracy bench-small bench-costs bench-data reliability scaling test-oldest test-peers clean
.PHONY: federation-quality bench-federation chaos predictions

# Removes the run first: a finished run would only print its result.
demo: $(VENV)/.installed
	rm -rf runs/demo
	$(VENV)/bin/arriero train

check: $(VENV)/.installed-test
	$(VENV)/bin/ruff check src tests recipes benchmarks
	$(VENV)/bin/ruff format --check src tests recipes benchmarks
	$(VENV)/bin/pyrefly check

# Fast tests of every package, without those marked slow: under two minutes on two cores.
QUICK = tests/test_*.py tests/config tests/model tests/plan \
	tests/data/test_order.py tests/data/test_store.py tests/data/test_loader.py tests/data/test_ledger.py \
	tests/data/test_sources.py tests/data/test_dataset.py tests/parallel/test_loss.py tests/train/test_schedule.py \
	tests/train/test_metrics.py tests/checkpoint/test_plan.py tests/bench/test_parity.py
quick: check
	$(VENV)/bin/python -m pytest $(PARALLEL) -m 'not slow' $(QUICK)

test: check $(VENV)/triton $(VENV)/trackers
	-$(MAKE) --no-print-directory .venv-federation/.installed
	$(VENV)/bin/python -m pytest $(PARALLEL)

# Weights & Biases, MLflow and Aim, whose dependencies differ from ours: 250 MB next to the packages of the environment.
$(VENV)/trackers: $(VENV)/.installed-test tests/trackers.txt
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --upgrade --target $@ -r tests/trackers.txt
	touch $@

# Triton compiles for AMD GPUs without one: 188 MB to download, 641 MB on disk, next to the packages of the environment.
$(VENV)/triton: $(VENV)/.installed-test
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --target $@ triton==3.6.0
	touch $@

# Two pages from the source, docs/config.md and docs/api-reference.md, and the site: open site/index.html. Needs no network.
docs: $(VENV)/.installed-docs
	$(VENV)/bin/arriero config reference > docs/config.md
	$(VENV)/bin/python docs/site.py docs/api-reference.md
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

# What only a GPU can show: some minutes on one. Fails where there is none.
gpu: $(VENV)/.installed-test
	$(VENV)/bin/python -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'torch sees no GPU here')"
	$(VENV)/bin/python -m pytest -m gpu

# Every layout of every model family against one process: about 20 minutes on two cores. Writes docs/parity.md.
parity: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(VENV)/bin/arriero bench parity --write docs/parity.md

# Scaled-down models of the benchmark in every layout and mode, to see that all work. Half an hour on two cores.
bench-small: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(VENV)/bin/arriero bench matrix --small --steps 5 --warmup 2 --out bench-small

# What training costs in addition to the arithmetic of a step. Some minutes; ARGS="--only overhead --json FILE".
bench-costs: $(VENV)/.installed-test
	$(VENV)/bin/python -m benchmarks.costs $(ARGS)

# Data preparation and reading, beside other systems that are installed. ARGS="--size 1GB".
bench-data: $(VENV)/.installed-test
	$(VENV)/bin/python -m benchmarks.data $(ARGS)

# Federated against centralised training; writes a table and a plot into docs/federation.md.
federation-quality: $(VENV)/.installed-test
	$(VENV)/bin/python -m benchmarks.federation_quality --work $$(mktemp -d) --write docs/federation.md

# 16 local sites for 15 minutes with a fault every 20 s, beside the same without; writes a table into docs/federation.md.
chaos: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m benchmarks.federation_chaos --write docs/federation.md $(ARGS)

# Throughput and memory of the aggregation against a plain copy. ARGS="--layers 2 --members 4".
bench-federation: $(VENV)/.installed-test
	$(VENV)/bin/python -m benchmarks.federation_speed $(ARGS)

# The oldest torch the package allows; its only build is the CUDA one, which also runs on CPU.
test-oldest: .venv-oldest/.installed-test
	.venv-oldest/bin/python -m pytest $(PARALLEL)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[fast]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[docs]'
	touch $@

.venv-oldest/.installed-test: pyproject.toml constraints.txt
	$(OLDEST_PYTHON) -m venv .venv-oldest
	sed 's/^torch==.*/torch==2.11.0/' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python $(PIP_INSTALL) -c .venv-oldest/constraints.txt -e '.[test]'
	touch $@

# Your data/ and runs/ are left alone.
clean:
	rm -rf .venv .venv-oldest .venv-peers .venv-federation .peers-gpu

# torchtitan and Arriero in turns on one GPU, dense and packed: about 15 minutes. Writes docs/performance.md. ARGS="--only bf16".
peers-gpu: $(VENV)/.installed .peers-gpu/.installed
	PYTHONPATH=$(CURDIR)/.peers-gpu:$(PYTHONPATH) $(VENV)/bin/python -m benchmarks.peers_gpu $(ARGS)

# Without dependencies, so that torch stays as it is.
.peers-gpu/.installed:
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --target .peers-gpu torchtitan==0.2.2 tyro torchdata docstring-parser typeguard shtab einops tomli
	touch $@

# The tests that need megatron-core and datatrove, from an environment of their own.
test-peers: $(VENV)/.installed-test .venv-peers/.installed
	ARRIERO_PEERS_PYTHON=$(CURDIR)/.venv-peers/bin/python $(VENV)/bin/python -m pytest tests/data/test_peers.py tests/data/test_datatrove_recipe.py tests/data/test_bench_peers.py

# StreamFlow, which reaches the sites of a federation: 177 MB on disk; its dependencies differ from ours.
.venv-federation/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-federation
	.venv-federation/bin/python $(PIP_INSTALL) --pre 'streamflow>=0.2.0rc3'
	touch $@

.venv-peers/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python $(PIP_INSTALL) torch==2.13.0
	.venv-peers/bin/python $(PIP_INSTALL) -e '.[peers]'
	touch $@

# Kills, damages and starves runs and Slurm jobs, launches 30 jobs, and writes docs/reliability.md; about an hour.
reliability: $(VENV)/.installed-test
	$(VENV)/bin/python tests/reliability.py --write docs/reliability.md $(ARGS)

# The planner beside published and measured results. Writes docs/planner-accuracy.md.
planner-accuracy: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks.planner docs/planner-accuracy.md

# What `arriero plan` predicts for the run files of examples/ and recipes/. Writes their pages; a minute.
predictions: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks.predictions

# How start and save grow with the number of ranks, and launches on up to 64 virtual Slurm nodes; writes docs/scaling.md; 20 minutes.
scaling: $(VENV)/.installed-test
	$(VENV)/bin/python -m benchmarks.scaling --write docs/scaling.md
