# Two commands to know: `make demo` and `make test`. Both create .venv when it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check-slow lint types bench results clean

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

# What is too slow for every change, before a release: hours on two cores. Stopped, the first goes on.
check-slow: $(STAMP)
	"$(BIN)/python" benchmarks/fuzz.py --cases 2000 --seed 0
	"$(BIN)/python" benchmarks/hostile.py --tries 1000
	"$(BIN)/python" benchmarks/kill.py --signals 60
	"$(BIN)/python" benchmarks/kill.py --signals 55 --moment saving
	"$(BIN)/python" benchmarks/step_cost.py
	"$(BIN)/python" benchmarks/diagnostics.py --out benchmarks/results/diagnostics.json

lint: $(STAMP)
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .

types: $(STAMP)
	"$(BIN)/pyright"

bench: $(STAMP)
	"$(BIN)/python" benchmarks/simulate.py
	"$(BIN)/python" benchmarks/step_cost.py
	"$(BIN)/python" benchmarks/time_to_quality.py
	"$(BIN)/python" benchmarks/image_step.py --scale digits
	"$(BIN)/python" benchmarks/image_noise.py

# All experiments, in full, into the page of results: hours on two cores. Stopped, it goes on where it was.
results: $(STAMP)
	for name in $$("$(BIN)/python" -c "from autodsm.experiments import EXPERIMENTS; print(*EXPERIMENTS)"); do \
	  if [ -d runs/results/$$name ]; then "$(BIN)/autodsm" resume runs/results/$$name; \
	  else "$(BIN)/autodsm" reproduce $$name --out runs/results/$$name; fi || exit 1; \
	done
	"$(BIN)/autodsm" report docs --add runs/results/*

clean:
	rm -rf "$(VENV)"
