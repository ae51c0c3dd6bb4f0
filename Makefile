# One word each: make (set-up), make demo, make test, make check, make bench, make chaos.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

all: $(READY)

# Exact pins, all of them listed, so no resolver runs and nothing unlisted comes along.
$(READY): requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@$(BIN)/python -m swarm.native
	@touch $(READY)
	@echo "ready: $(BIN)/swarm --help"

demo: $(READY)
	$(BIN)/swarm demo

test: $(READY) check
	$(BIN)/python -m tests

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# make bench ONLY=decode runs one part.
bench: $(READY)
	$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY))

# make chaos SEED=1 MINUTES=5; needs root, iproute2 and /dev/net/tun, but with NETWORK=loopback.
chaos: $(READY)
	$(BIN)/python -m tests.lab.chaos --seed $(or $(SEED),0) --minutes $(or $(MINUTES),2) --network $(or $(NETWORK),lab)

clean:
	rm -rf .venv .pytest_cache .hypothesis .mypy_cache .ruff_cache bench.json

.PHONY: all demo test check bench chaos clean
