# The two commands: `make demo` and `make test`. Both set up first whatever is missing, as root, on
# Debian 12, Debian 13 or Ubuntu 24.04.

VENV   := .venv
PYTHON := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
APT    := python3-bpfcc python3-venv libbpf1 linux-libc-dev iproute2 gcc libc6-dev clang-format procps

.PHONY: setup demo test check format clean bench soak fuzz

setup: $(STAMP)  ## install what the project needs: apt packages and .venv

$(STAMP): pyproject.toml Makefile
	@missing=""; for package in $(APT); do \
	  dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$package"; \
	done; \
	if [ -n "$$missing" ]; then \
	  echo "installing with apt-get:$$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	fi
	@# The distribution's python: only that one sees the distribution's bcc.
	@test -x $(PYTHON) || { echo "making $(VENV) with /usr/bin/python3"; /usr/bin/python3 -m venv --system-site-packages $(VENV); }
	@echo "installing into $(VENV): ebpfproxy, its dependencies and the tools of its tests"
	@$(PYTHON) -m pip install -q --upgrade 'pip>=25.1'
	@$(PYTHON) -m pip install -q --group dev -e .
	@touch $@

demo: $(STAMP)  ## pods, a Service, the agent, and what it does, in under a minute
	@$(VENV)/bin/ebpfproxy demo

check: $(STAMP)  ## formatting, lint, types, layers
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	clang-format --dry-run --Werror bpf/*.c bpf/*.h ebpfproxy/bench/*.c

test: check  ## everything this machine can run
	$(PYTHON) -m pytest

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	clang-format -i bpf/*.c bpf/*.h ebpfproxy/bench/*.c

clean:
	rm -rf $(VENV) dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis
