# `make app` and `make test` set everything up by themselves; see README.md.
PYTHON ?= python3
PORT ?= 8501
# Who may connect: localhost is this machine alone, 0.0.0.0 everybody in the network.
ADDRESS ?= localhost
ARGS ?=

VENV := .venv/bin/python
.PHONY: app test lint check claims bench clean env env-tests

app: env
	@exec $(VENV) -m streamlit run app.py --server.port $(PORT) --server.address $(ADDRESS)

# Browser tests share one worker (tests/browser/conftest.py), the rest is dealt out to both.
test: env-tests
	@exec $(VENV) -m pytest -n 2 --dist loadgroup $(ARGS)

lint: env-tests
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy

# The fast one, before every commit: under a minute.
check: lint
	$(VENV) tools/check_content.py
	$(VENV) -m pytest -n 2 -m "not browser and not claims and not slow" $(ARGS)

# Runs every claim of the deck; ARGS="--card ID --seeds 50 --write" and so on.
claims: env
	@exec $(VENV) tools/run_claims.py $(ARGS)

# One table of times and sizes; ARGS names subjects, none means all.
bench: env-tests
	@exec $(VENV) -m bench.run $(ARGS)

env:
	@$(PYTHON) tools/setup_env.py

env-tests:
	@$(PYTHON) tools/setup_env.py --tests

clean:
	rm -rf .venv out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
