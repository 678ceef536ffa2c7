# Everything runs in .venv, which is made on first use and brought up to date when its recipe changes.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
DOCS := .venv/.docs-stamp
NOTEBOOK := .venv/.notebook-stamp
BYTECODE := .venv/.bytecode-stamp
# make gpu-rehearsal has a second environment: the packages of a GPU machine's image.
PYTHON312 ?= python3.12
REHEARSAL := .venv-rehearsal
BENCHMARKS := $(filter-out benchmarks/_% benchmarks/gpu.py,$(sort $(wildcard benchmarks/*.py)))  # make gpu runs that one

# Three tests at a time on two cores, as some of them wait; those that measure time run alone. One
# thread of OpenMP each: threads of several processes would spin on the same cores.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist worksteal

# Deno checks the JavaScript of the interactive timeline; deno.json has the rules.
PAGE := pipesim/plot/page
DENO := DENO_DIR=.venv/.deno DENO_NO_UPDATE_CHECK=1 $(BIN)/deno

# Without its bytecode, torch takes seconds more to load in every process.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo notebook check test lint quick docs fuzz chaos bench gpu gpu-first gpu-second gpu-unpack gpu-rehearsal clean
.DELETE_ON_ERROR:

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP)  ## profile, predict and run GPipe and 1F1B; writes results/demo/
	$(BIN)/pipeexec validate --name demo

# Links of notebooks lead to pages of docs/, so that the root is the repository.
notebook: $(NOTEBOOK)  ## JupyterLab with the notebooks, in a browser; OPTIONS="--no-browser --port 8890" are those of jupyter lab
	$(BIN)/python -m jupyterlab --ServerApp.root_dir="$(CURDIR)" \
	  --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(OPTIONS)

check: $(STAMP)  ## lint and the quick tests, at the same time
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint quick

test: $(STAMP)  ## lint, then every test (docstring examples and notebooks included)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint $(BYTECODE)
	$(TESTS) -n 3 --durations=30

quick: $(STAMP)  # beside mypy, which has one thread
	$(TESTS) -n 2 -m 'not slow and not measures_time'

lint: $(STAMP)  ## ruff, mypy --strict, import-linter, deno for JavaScript, names that say nothing, docstrings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-logo
	$(DENO) lint --quiet
	$(DENO) fmt --check
	$(DENO) check --quiet $(PAGE)
	$(BIN)/python tools/plain_names.py
	$(BIN)/python tools/docstrings.py

# Warnings are errors, names that lead nowhere too. Nothing is fetched: $(DOCS) has the builder and its themes. It builds
# anew: results that an earlier build kept may be those of other code.
SITE := docs/_build docs/auto_gallery docs/reference/generated docs/reference/backreferences docs/reference/command_line
docs: $(DOCS)  ## the site, in docs/_build/html: tutorials, how-tos, gallery, reference; every example is run
	rm -rf $(SITE)
	$(BIN)/python -m sphinx --builder html --jobs 2 --nitpicky --fail-on-warning docs docs/_build/html
	$(BIN)/python tools/site_links.py docs/_build/html

fuzz: $(STAMP)  ## every property on 100 examples, engines on 8,000 random graphs, replays of 2,000, the page on 1,000, 1,000 flipped bits of each kind of file, splits of 2,000 random models
	$(TESTS) -n 3 -m hypothesis --hypothesis-profile=fuzz
	FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest tests/pipesim/simulation/test_compiled_engine.py \
	  tests/pipesim/network/test_collective_links.py --hypothesis-show-statistics
	FUZZ_EXAMPLES=500 $(BIN)/python -m pytest tests/pipesim/analysis/test_replay.py --hypothesis-show-statistics
	FUZZ_EXAMPLES=1000 $(BIN)/python -m pytest tests/project/test_flipped_files.py tests/pipesim/plot/page/test_page_numbers.py
	FUZZ_EXAMPLES=2000 $(TESTS) -n 3 tests/pipeexec/splitting/test_tricky_models.py -k random

chaos: $(STAMP)  ## every fault, ending and product of cases of the tests, then 50 random ones; writes results/benchmarks/chaos.txt
	FAULTS=all $(BIN)/python -m pytest tests/project/test_attack.py $$(grep -rl case_choice tests --include "test_*.py")
	$(BIN)/python tests/helpers/chaos.py --out results/benchmarks/chaos.txt

bench: $(STAMP)  ## run every script in benchmarks/
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script"; done

# No .venv and no network: $(PYTHON) is one whose torch has CUDA. A dry run has .venv, unless PYTHON is given.
# Options come from the command line alone: an environment may have an OUT of its own.
given = $(if $(findstring command,$(origin $(1))),$(2) "$($(1))")
IN_VENV := $(and $(DRY_RUN),$(filter file,$(origin PYTHON)))
gpu_script = @PYTHONPATH="$(CURDIR):$$PYTHONPATH" $(if $(IN_VENV),$(BIN)/python,$(PYTHON)) benchmarks/gpu.py \
	$(1) $(call given,ONLY,--only) $(call given,PACK,--pack) $(call given,LIMIT,--limit) \
	$(call given,WHEELS,--wheels) $(call given,OUT,--out) $(if $(FULL),--full) $(if $(DRY_RUN),--dry-run)
gpu: $(if $(IN_VENV),$(STAMP))  ## all that needs a GPU; ONLY=steps PACK=folder LIMIT=seconds WHEELS=folder, FULL=1, or DRY_RUN=1
	$(call gpu_script,)

gpu-first: $(if $(IN_VENV),$(STAMP))  ## the first nine minutes on a GPU; PACK=folder WHEELS=folder, or DRY_RUN=1
	$(call gpu_script,--call first)

gpu-second: $(if $(IN_VENV),$(STAMP))  ## the next three: features, then steps that failed in the first; likewise
	$(call gpu_script,--call second)

gpu-unpack: $(STAMP)  ## put what make gpu packed (FILE=gpu.tar.gz) into results/gpu, with tables and figures
	@$(BIN)/python benchmarks/gpu.py --unpack "$(FILE)" $(call given,OUT,--out)

gpu-rehearsal: $(REHEARSAL)/.stamp  ## make gpu and its code on a machine without a GPU, with $(PYTHON312); slow to install
	PYTHONPATH=tests/helpers $(REHEARSAL)/bin/python tests/project/make_gpu/rehearsal.py

clean:  ## remove caches and build artefacts; leaves the environments and results/
	rm -rf $(SITE) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +
	find . -path './.venv*' -prune -o -type d -name .ipynb_checkpoints -exec rm -rf {} +

# The constraints hold for indirect dependencies too, so that torch is the build named there.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	touch $@

# In a new environment, each of the three workers would compile torch and rewrite the assertions of all tests, and
# wait for kernels that another one compiles.
$(BYTECODE): $(STAMP)
	-$(BIN)/python -m pytest --collect-only -q > /dev/null
	-$(BIN)/python tests/helpers/kernels.py
	touch $@

$(NOTEBOOK): $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[notebook]'
	touch $@

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[docs]'
	touch $@

# Images lack simpy, so that it stays a wheel, as for make gpu WHEELS=.
$(REHEARSAL)/.stamp: constraints-rehearsal.txt
	@$(PYTHON312) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2> /dev/null || { \
	echo 'make gpu-rehearsal needs Python 3.12, and $(PYTHON312) is not; give PYTHON312=path' >&2; exit 1; }
	test -x $(REHEARSAL)/bin/python || $(PYTHON312) -m venv $(REHEARSAL)
	$(REHEARSAL)/bin/python -m pip install --disable-pip-version-check -c $< torch cuda-bindings \
	cloudpickle hypothesis joblib matplotlib numba numpy pandas pytest safetensors tqdm
	$(REHEARSAL)/bin/python -m pip download --disable-pip-version-check -c $< --no-deps -d $(REHEARSAL)/wheels simpy
	touch $@
