# Two commands to know: `make demo` and `make test`. Both create .venv when it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types bench figures clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "autodsm needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x "$(BIN)/python" || $(PYTHON) -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[images,dev]"
	@touch "$(STAMP)"

demo: $(STAMP)
	"$(BIN)/autodsm" reproduce demo

test: $(STAMP)
	"$(BIN)/python" -m pytest

lint: $(STAMP)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .

types: $(STAMP)
	"$(BIN)/pyright"

bench: $(STAMP)
	"$(BIN)/python" benchmarks/simulate.py
	"$(BIN)/python" benchmarks/step_cost.py
	"$(BIN)/python" benchmarks/time_to_quality.py

# The figures and numbers that the README shows.
figures: $(STAMP)
	rm -rf runs/figures
	"$(BIN)/autodsm" reproduce all --out runs/figures
	mkdir -p docs/figures
	cp runs/figures/demo/figures/demo.png docs/figures/demo.png
	cp runs/figures/mean-error/figures/mean-error.png docs/figures/mean-error.png
	cp runs/figures/gradient-variance/figures/gradient-variance.png docs/figures/gradient-variance.png
	cp runs/figures/lambda-sweep/figures/lambda-sweep.png docs/figures/lambda-sweep.png
	mkdir -p docs/results
	for name in demo gradient-variance lambda-sweep; do cp runs/figures/$$name/result.json docs/results/$$name.json; done

clean:
	rm -rf "$(VENV)"
