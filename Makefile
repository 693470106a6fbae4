PYTHON ?= python3
# mypy: the last line that still checks for Python 3.8, the oldest that agentcli.py runs on.
LINTERS = mypy==1.14.1 ruff==0.17.6
# FA100 wants `from __future__ import annotations`: a module that would be imported before
# agentcli.py has taken its own folder off the module path.
# UP031 in the tests: % fills in program texts that are full of braces.
RUFF = check --isolated --no-cache --output-format concise --target-version py38 \
  --extend-select B,SIM,UP,PIE,RET,C4 --ignore FA100 --per-file-ignores test_agentcli.py:UP031

.PHONY: help test integration demo fuzz lint bench vendor

help: ## what can be made (the default)
	@sed -n 's/^\([a-z]*\):.*## /make \1: /p' Makefile
	@echo 'Another interpreter: make test PYTHON=python3.8'

test: ## every test, offline
	$(PYTHON) test_agentcli.py

integration: ## a real tool (beangulp) and a real nginx; installs them where that is allowed
	@command -v nginx >/dev/null || [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null || \
	  { apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq nginx-light; } >/dev/null 2>&1 || \
	  echo 'integration: nginx could not be installed'
	$(PYTHON) test_agentcli.py integration

fuzz: ## the fuzz tests for minutes (FUZZ_SECONDS, FUZZ_SEED)
	FUZZ_SECONDS=$${FUZZ_SECONDS:-120} FUZZ_SEED=$${FUZZ_SEED:-$$$$} $(PYTHON) test_agentcli.py FuzzTest KillTest

demo: ## a small service on loopback, called once for each exit code
	$(PYTHON) test_agentcli.py demo

bench: ## what a call through agentcli costs, side by side with plain calls (BENCH_RUNS=40)
	$(PYTHON) test_agentcli.py bench

lint: ## mypy --strict, ruff, and the bounds on agentcli.py; installs both in a throw-away environment
	@set -u; failed=0; run() { echo "$${1##*/}$${*#"$$1"}"; "$$@" || failed=1; }; \
	tools=$$(mktemp -d) || exit 1; trap 'rm -rf "$$tools"' EXIT; trap 'exit 1' HUP INT TERM; \
	$(PYTHON) -m venv "$$tools" && \
	"$$tools/bin/python" -m pip install -qq --disable-pip-version-check $(LINTERS) || { \
	  echo 'make lint: $(LINTERS) could not be installed: that needs the venv module with pip,' \
	    'and a package index that answers' >&2; exit 1; }; \
	for target in 3.8 3.13; do \
	  run "$$tools/bin/mypy" --strict --python-version $$target --cache-dir "$$tools/cache" agentcli.py; \
	done; \
	run "$$tools/bin/ruff" $(RUFF) agentcli.py test_agentcli.py; \
	if LC_ALL=C.UTF-8 grep -nE '.{101}' agentcli.py; then \
	  failed=1; echo 'agentcli.py: the lines above have more than 100 characters'; fi; \
	echo "agentcli.py has $$(wc -l < agentcli.py) lines; each one is compiled on every script run"; \
	[ $$failed = 0 ] && echo 'lint: nothing found'

# DEST reaches the shell as a variable, so that it may hold spaces and quotes.
vendor: export DEST := $(DEST)
vendor: export FORCE := $(FORCE)
vendor: ## copy agentcli.py into DEST=folder, with the example manifest if that has none
	@[ -n "$$DEST" ] || { echo 'make vendor: name the folder: make vendor DEST=path/to/folder' >&2; exit 2; }
	@[ -d "$$DEST" ] || { echo "make vendor: not a folder: $$DEST" >&2; exit 2; }
	@[ -n "$$FORCE" ] || [ ! -e "$$DEST/agentcli.py" ] || cmp -s agentcli.py "$$DEST/agentcli.py" || { \
	  copy=$$(git hash-object --no-filters "$$DEST/agentcli.py") && \
	  git rev-list --all --objects -- agentcli.py | grep -q "^$$copy "; } 2>/dev/null || { \
	  echo "make vendor: $$DEST/agentcli.py is no version that git has here, so it may have been" \
	    'edited: keep the changes that you need, then add FORCE=1' >&2; exit 2; }
	@cp agentcli.py "$$DEST/agentcli.py"
	@[ -e "$$DEST/manifest.json" ] || { cp manifest.example.json "$$DEST/manifest.json"; \
	  echo "made $$DEST/manifest.json from the example: replace its commands by your own"; }
	@$(PYTHON) -I -c 'import hashlib, json, subprocess, sys; path = sys.argv[1]; \
	answer = subprocess.check_output([sys.executable, path, "--format", "json", "--version"]); \
	print("copied agentcli", json.loads(answer)["data"]["agentcli_version"], "to", path); \
	print("sha256", hashlib.sha256(open(path, "rb").read()).hexdigest())' "$$DEST/agentcli.py"
