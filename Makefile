PYTHON ?= python3
ARGS ?=
TIMES ?= 50

BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help test fuzz demo check clean
.DEFAULT_GOAL := help

help:
	@echo "make test   run the tests            (ARGS=... goes to pytest)"
	@echo "make fuzz   the tests of reliability with 50 times the examples and every kill point (TIMES=... sets another)"
	@echo "make demo   forget a class, end to end (ARGS=... goes to the demo)"
	@echo "make check  lint, formatting, types"
	@echo "make clean  remove .venv, caches and build outputs"
	@echo
	@echo "The first run makes .venv with $(PYTHON); PYTHON=... picks another interpreter."

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into .venv (once, and again when pyproject.toml or constraints.txt change)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

fuzz: $(INSTALLED)
	UNMERGE_FUZZ=$(TIMES) $(BIN)/python -m pytest tests/reliability $(ARGS)

demo: $(INSTALLED)
	$(BIN)/unmerge demo --overwrite $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

clean:
	rm -rf .venv build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +
