# The developer's manual in a dozen words: `make help`.
PYTHON ?= python3
DEVICE ?= auto
PROMETHEUS ?= http://127.0.0.1:9090
RUN ?= sort-digits
MINUTES ?= 10
FAULTS ?= 300
SEED ?= 1
PROCESSES ?= $(shell expr $$(nproc 2>/dev/null || sysctl -n hw.logicalcpu) + 1)
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder
TESTS := tests/unit tests/walk tests/fuzz tests/kube examples/plugins
# Three whole processes, of files that tests/long.txt leaves out: a run, vLLM, two ranks.
SMOKES := tests/integration/test_local_run.py::test_a_run_trains_off_policy_and_leaves_a_model_that_loads \
	tests/unit/rollout/engines/vllm/test_engine.py::TestEngine::test_every_token_is_scored_by_the_version_that_its_span_names \
	'tests/unit/learner/ranks/test_update_on_ranks.py::test_an_update_on_ranks_is_the_update_on_one_rank[2 ranks]'
# Tests and runs start processes by the hundred, and without bytecode each compiles the tree anew.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup system-packages demo demo-ranks demo-vllm demo-real e2e observe test test-all walk fuzz chaos lint types style format protos locks licenses digests sbom images-check site chart bench clean
.DEFAULT_GOAL := help

help: ## say what each word does
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; echo "Left out of make test, part of make test-all (tests/long.txt):"; grep -v '^#' tests/long.txt | sed 's/^/  /'

setup: .venv/installed system-packages ## make .venv with everything, for the GPU if there is one (DEVICE=cuda|cpu), and the system packages the tests use

.venv/installed: pyproject.toml deploy/constraints.txt scripts/install.sh
	@echo "Installing into .venv (800 MB to fetch, several GB with a GPU, torch and vLLM above all; a few minutes)"
	@scripts/install.sh --device $(DEVICE) $(PYTHON)
	@touch $@

system-packages:
	@scripts/system_packages.sh

demo: .venv/installed ## train a tiny model asynchronously on this machine and watch it (about 2 minutes)
	@$(BIN)/vcpo run examples/sort_digits.yaml --json

demo-ranks: .venv/installed ## the demo with a learner of two ranks, on the CPU or on two GPUs beside the workers' (about 3 minutes)
	@$(BIN)/vcpo run examples/sort_digits_ranks.yaml --json

demo-vllm: .venv/installed ## the demo with vLLM and LoRA, adapters swapped while it generates (Linux; about 3 minutes)
	@$(BIN)/vcpo run examples/sort_digits_vllm.yaml --json

demo-real: .venv/installed ## train a pretrained model of 135 M parameters, SmolLM2, to add (fetches 94 MB; 10 to 20 minutes; ENGINE=vllm, ENGINE=lora)
	@$(BIN)/python -m examples.demo_real examples/sums_smollm2$(if $(ENGINE),_$(ENGINE)).yaml

e2e: .venv/installed ## the operator and a whole run in a cluster of processes; no Kubernetes needed (about 2 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.cluster

observe: .venv/installed ## metrics, rules, dashboards and the alarm on four real runs, seen by a real Prometheus (about 7 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.observation

test: setup ## lint and the tests that take minutes; ONLY=tests/unit/learner/ledger runs one folder or file, without lint
ifdef ONLY
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ONLY)
else
	@$(MAKE) --no-print-directory -j 2 types style
	@$(PYTEST) $(TESTS) $(SMOKES)
endif

test-all: setup ## what CI runs: lint and every test, with engines, ranks, whole runs, chaos and four observed runs
	@$(MAKE) --no-print-directory -j 2 types style
	@# The order of files is that of tests/conftest.py: xdist's own begins with those of most tests.
	@$(PYTEST) $(TESTS) tests/integration tests/e2e tests/chaos --long
	@# The last watch runs that have a machine for themselves.
	$(BIN)/python -m pytest tests/observation

fuzz: .venv/installed ## new inputs for every reader of untrusted bytes, for MINUTES=10; a short form is in `make test`
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --minutes $(MINUTES)

walk: .venv/installed ## make the mistakes of a first day with the installed command, and judge what it says (about 3 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.walk --json

chaos: MINUTES = 30
chaos: .venv/installed ## a real run under FAULTS=300 random faults of SEED=1, for at most MINUTES=30; a short form is in `make test-all`
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --faults $(FAULTS) --seed $(SEED) --minutes $(MINUTES)

lint: .venv/installed ## ruff, mypy --strict, import-linter, generated files up to date
	@$(MAKE) --no-print-directory -j 2 types style

types:
	$(BIN)/mypy

style:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	@$(BIN)/python scripts/generate_stubs.py --check
	@$(BIN)/python -m scripts.render_manifests --check
	@$(BIN)/python -m tools.size --check
	@$(BIN)/python -m scripts.supply.locks --check
	@$(BIN)/python -m scripts.supply.base_images --check

format: .venv/installed ## rewrite the sources as ruff likes them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: .venv/installed ## generate core/vcpo/wire/v1 from protos/
	@$(BIN)/python scripts/generate_stubs.py

locks: .venv/installed ## compile deploy/locks, what each image installs, from pyproject.toml and deploy/constraints.txt
	@$(BIN)/python -m scripts.supply.locks

.venv/supply: # an environment of its own: what it installs makes `kubernetes` load four seconds slower
	@$(BIN)/python -m venv .venv/supply
	@.venv/supply/bin/pip install --quiet 'cyclonedx-bom>=7.5,<8' 'pip-licenses>=5.5,<6'

licenses: .venv/installed .venv/supply ## list the license of every package that is installed here
	@.venv/supply/bin/pip-licenses --python $(BIN)/python --from mixed

digests: .venv/installed ## pin the base images by the digest that their tag has now (takes docker and a registry)
	@$(BIN)/python -m scripts.supply.base_images

sbom: .venv/installed .venv/supply ## write a bill of materials for each lock, dist/sbom (CycloneDX)
	@mkdir -p dist/sbom
	@for lock in $(filter-out %.overrides.txt,$(notdir $(wildcard deploy/locks/*.txt))); do \
		.venv/supply/bin/cyclonedx-py requirements deploy/locks/$$lock --pyproject pyproject.toml \
			--output-reproducible --output-file dist/sbom/$${lock%.txt}.cdx.json || exit 1; \
	done

site: .venv/installed ## write the documents as a site, dist/site, and check its links (pip install 'vcpo[site]' first)
	@$(BIN)/python -m scripts.document_site

images-check: .venv/installed ## carry out the Dockerfiles in clean roots, as root with mmdebstrap; PACKAGES=1 installs the gigabytes too; TORCH_INDEX_URL=URL takes the images for CPUs, and runs a cluster in them
	@$(if $(TORCH_INDEX_URL),rm -rf dist/roots && )$(BIN)/python -m scripts.supply.images_check $(if $(PACKAGES),--packages) \
		$(if $(TORCH_INDEX_URL),--torch-index $(TORCH_INDEX_URL) --keep dist/roots)
	@$(if $(TORCH_INDEX_URL),OMP_NUM_THREADS=1 $(BIN)/python -m tests.e2e.cluster --roots dist/roots)

chart: .venv/installed ## package the chart, dist/chart; PUSH=oci://HOST/PATH sends it to a registry
	@$(BIN)/python -m scripts.package_chart $(if $(PUSH),--push $(PUSH))

bench: .venv/installed ## run every benchmark; the last line of each is one JSON object
	@for name in estimators.reference_parity learner.host_syncs learner_step estimators.calibration operator_scale learner.ingest rollout.weight_sync rollout.vllm_pause learner.learner_host publish early_warning async_speedup peers scaling model_families "seeds examples/sort_digits.yaml"; do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

clean: ## remove everything that was generated or installed
	rm -rf .venv runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
