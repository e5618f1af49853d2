# Everything a contributor needs; CI calls the same targets and nothing else.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Further arguments for pip, such as an index with CPU builds of torch:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=

.PHONY: help install demo test soak check format protos clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

install: $(VENV)/.installed ## Make .venv and install Outrider with its development tools

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Outrider needs Python 3.11 or later; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: install ## Speculation off and on with the embedded model, on this machine
	$(BIN)/outrider demo

test: install ## Run every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist worksteal

soak: install ## Kill, stop and cut off everything at random under load, for some minutes
	$(BIN)/python -m bench soak --generations 200 --new-tokens 128 --pace-s 0.04 --least-outages 100 --bar

check: install ## Run every linter and type check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint
	$(BIN)/python scripts/generate_protos.py --check
	$(BIN)/python scripts/check_layout.py

format: install ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: install ## Generate outrider/pb from protos/
	$(BIN)/python scripts/generate_protos.py

clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
