# The two commands are `make demo` and `make test`. Both install first whatever is missing; on a fresh
# machine that takes root, and Debian 12, Debian 13 or Ubuntu 24.04 (with its "universe").

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV   := .venv
PYTHON := $(VENV)/bin/python
CLI    := $(VENV)/bin/ebpfproxy
STAMP  := $(VENV)/.installed

# What Python packages cannot bring: bcc (PyPI's is an unrelated package) and the C headers that it
# includes, `ip` and `mount` for the lab's network namespaces, a C compiler for its loads; crun starts
# the DaemonSet's pod in the tests, ipvsadm shows there what an operator sees; qemu, busybox and kmod
# boot other kernels, flex, bison, bc and xz-utils build one; zsh and fish complete commands in the tests, curl
# runs commands of the documents.
APT    := python3 python3-venv python3-bpfcc linux-libc-dev iproute2 mount gcc libc6-dev iptables nftables \
  ipset ipvsadm crun qemu-system-x86 busybox-static kmod flex bison bc xz-utils zsh fish curl
# Packages that are extracted into .venv/debian and not installed: an installation of prometheus would start a server.
# Tests check the alerts with promtool and let prometheus fire them; golang-github-containers-common has the seccomp
# filter with which container runtimes start the pod of deploy/least-privilege. promtool is a package of its own since
# Debian 13, before that it is in prometheus.
EXTRACTED := prometheus golang-github-containers-common
C      := $(wildcard bpf/*.c bpf/*.h ebpfproxy/bench/*.c ebpfproxy/bench/c/*.[ch] tests/support/*.c)
# What the benches compare, and what `make soak` switches among; where the kernel has IPVS:
# make soak SOAK_MODES=ebpf,iptables,nftables,ipvs
MODES      := ebpf,nftables,iptables-legacy,iptables-nft
SOAK_MODES := ebpf,iptables,nftables
SOAK_SECONDS := 3600
CONNECTIONS := 10000
FORWARDING  := snat
# What `make image` builds: a variant is a target of deploy/Dockerfile, default or with-bcc.
IMAGE   := localhost/ebpfproxy
VARIANT := default
# OWNER/NAME on GitHub, which the files of a release name.
REPOSITORY := example/ebpfproxy
# What `make coverage` runs as root beside the fast tests: some of each kind, for a few minutes.
COVERED := $(addprefix tests/kernel/,service_table/test_contents.py service_table/test_room.py \
  nftables_table/test_rejections.py test_agent_restarts.py test_ebpf_drain.py test_iptables_rejections.py \
  test_links.py test_map_migration.py test_packet_path_view.py test_sockets.py test_view.py)

# Tests start some thousand Python processes. Without compiled modules, each compiles its source again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(STAMP)  ## install what is missing: apt packages (as root) and .venv
	@echo "ready: $(CLI)"

$(STAMP): pyproject.toml Makefile
	@missing=""; for package in $(APT); do \
	  dpkg-query -W -f '$${Status}\n' $$package 2>/dev/null | grep -q ' ok installed$$' || missing="$$missing $$package"; \
	done; \
	test -z "$$missing" && exit; \
	if [ "$$(id -u)" -ne 0 ]; then \
	  echo "missing packages; as root: apt-get install$$missing" >&2; exit 1; \
	fi; \
	echo "apt-get install:$$missing"; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing >/dev/null </dev/null || { \
	  echo "the packages could not be installed; on Ubuntu, is \"universe\" enabled?" >&2; exit 1; }
	@# The distribution's own Python: no other one sees the distribution's bcc.
	@test -x $(PYTHON) || { \
	  echo "$(VENV): /usr/bin/python3 -m venv --system-site-packages"; \
	  /usr/bin/python3 -m venv --system-site-packages $(VENV); }
	@echo "$(VENV): pip install ebpfproxy, its dependencies, and the tools of its tests"
	@$(PYTHON) -m pip install -q --upgrade 'pip>=25.1'  # the first that knows --group
	@$(PYTHON) -m pip install -q --group dev -e .
	@echo "$(VENV)/debian: files of $(EXTRACTED)"
	@download() { \
	  apt-get download -qq $(EXTRACTED) $$(apt-cache show promtool >/dev/null 2>&1 && echo promtool); }; \
	rm -rf $(VENV)/debian && mkdir -p $(VENV)/debian && cd $(VENV)/debian && \
	{ download || { apt-get update -qq && download; } ; } 2>/dev/null && \
	for package in *.deb; do dpkg-deb -x $$package . && rm $$package; done || \
	echo "cannot download $(EXTRACTED): tests that need them are skipped" >&2
	@touch $@

.PHONY: demo
demo: $(STAMP)  ## pods, a Service and the agent in namespaces of this machine, in under a minute
	@$(CLI) demo

.PHONY: test
test: check  ## the checks, and each test in each mode and family that this machine can run: 11 to 18 minutes, as root
	@$(PYTHON) -m pytest -n 6 --sample --durations=20

.PHONY: test-all
test-all: check  ## the checks, and all cases of all tests that this machine can run, as root
	@$(PYTHON) -m pytest -n 6 --durations=20

.PHONY: objects
objects: $(STAMP)  ## compile the BPF programs for a wheel or an image, as root
	@$(CLI) compile --output=ebpfproxy/objects

.PHONY: image
image: objects  ## build the image with buildah: make image IMAGE=registry/name:tag VARIANT=default
	buildah build -f deploy/Dockerfile --target=$(VARIANT) -t $(IMAGE) .

.PHONY: release-files
release-files: objects  ## write the files of a release into dist/ and print their digests: make release-files REPOSITORY=owner/name
	@rm -rf dist && $(PYTHON) deploy/release.py $(REPOSITORY) dist

.PHONY: release-dry-run
release-dry-run: release-files  ## build what a release publishes, and print the digests; the image only where buildah and a registry are
	@command -v buildah >/dev/null || { echo "no image: apt-get install buildah"; exit 0; }; \
	buildah build --quiet -f deploy/Dockerfile --target=$(VARIANT) . || echo "no image: see the error above"

.PHONY: test-image
test-image: $(STAMP)  ## build the image from nothing, as its Dockerfile says, and serve from it: ten minutes, as root
	@DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends buildah debootstrap >/dev/null
	@$(PYTHON) -m pytest -q --timeout=1800 --image tests/deploy

.PHONY: test-vm
test-vm: $(STAMP)  ## the kernel's tests in VMs, on every kernel of tests/vm/kernels.toml: some hours
	@$(PYTHON) -m pytest --timeout=0 --kernels=all tests/vm; failed=$$?; \
	$(PYTHON) -m tests.vm.table docs/kernels.md && exit $$failed

.PHONY: test-user-mode
test-user-mode: $(STAMP)  ## the kernel's tests on a kernel in user mode, with IPVS, SCTP and Geneve: an hour or two, and ten minutes to build it; as root
	@$(PYTHON) -m pytest --timeout=0 --kernels=user-mode --durations=0 tests/vm

.PHONY: test-cluster
test-cluster: objects  ## upstream's sig-network tests in kind clusters, or in that of KUBECONFIG: make test-cluster CLUSTER="--cni=flannel"; hours
	@$(PYTHON) -m tests.cluster $(CLUSTER)

.PHONY: check
check: $(STAMP)  ## formatting, lint, types, layers, spelling, words of the style guide
	@$(MAKE) --no-print-directory --jobs=2 --output-sync types style collect

.PHONY: types
types: $(STAMP)
	$(VENV)/bin/mypy

# Compiles all tests, once and not in each worker.
.PHONY: collect
collect: $(STAMP)
	@$(PYTHON) -m pytest --collect-only -qq >$(VENV)/collected || { cat $(VENV)/collected; exit 1; }

.PHONY: style
style: $(STAMP)
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/clang-format --dry-run --Werror $(C)
	$(VENV)/bin/codespell --builtin clear,rare,en-GB_to_en-US --ignore-words-list aks,fo,fro,iif,runn \
	  --skip '*.svg,captured,__pycache__' *.md docs ebpfproxy bpf tests deploy vagrant Makefile pyproject.toml
	$(PYTHON) -m tests.support.words

.PHONY: quick
quick: check  ## format, types, unit and golden tests: a minute
	@$(PYTHON) -m pytest -q -n 4 --sample tests/unit tests/golden ebpfproxy

.PHONY: edge-lab
edge-lab: $(STAMP)  ## two edges with BGP (FRR), as root: make edge-lab CONNECTIONS=100000 FORWARDING=dsr
	@test -x /usr/lib/frr/bgpd || \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends frr >/dev/null
	@$(PYTHON) -m tests.edge_lab --connections=$(CONNECTIONS) --forwarding=$(FORWARDING)

.PHONY: mutations
mutations: $(STAMP)  ## break the code in 60 ways that a tool has chosen, and list those that make test misses; as root, hours
	@$(PYTHON) -m tests.mutations

.PHONY: coverage
coverage: $(STAMP)  ## lines and branches that unit, golden and contract tests run; as root also some kernel tests
	@rm -rf build/coverage && mkdir -p build/coverage
	@failed=0; $(PYTHON) -m coverage run -m pytest -q --timeout=600 tests/unit tests/golden tests/contract || failed=1; \
	test "$$(id -u)" -ne 0 || $(PYTHON) -m coverage run -m pytest -q --timeout=600 $(COVERED) || failed=1; \
	$(PYTHON) -m coverage combine -q && $(PYTHON) -m coverage json -q -o build/coverage/report.json && \
	$(PYTHON) -m tests.support.coverage_totals build/coverage/report.json && exit $$failed

.PHONY: docs
docs: $(STAMP)  ## build the site in build/site and check its links
	@$(PYTHON) -m pip install -q --group docs
	@mkdir -p build; NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict 2>build/site.log || { cat build/site.log >&2; exit 1; }
	@echo "build/site/index.html"

.PHONY: docs-generate
docs-generate: $(STAMP)  ## write the parts of docs/ that come from code
	@$(PYTHON) docs/generate.py

.PHONY: fuzz
fuzz: $(STAMP)  ## 200 000 broken API objects through parse, plan and render; 100 000 malformed HTTP requests; ten million random packets, and as many through devices; 10 000 changes of a random tenant
	$(PYTHON) -m pytest -q --timeout=0 --junk=200000 tests/unit/api/test_junk.py tests/unit/plan/test_junk_plans.py
	$(PYTHON) -m pytest -q --timeout=0 --requests=100000 tests/unit/http/test_hostile_requests.py
	$(PYTHON) -m pytest -q --timeout=0 --packets=10000000 tests/kernel/packet_path/test_packet_random.py tests/kernel/packet_path/test_packet_xdp.py
	$(PYTHON) -m pytest -q --timeout=0 --packets=10000000 tests/kernel/packet_path/test_packet_devices.py
	$(PYTHON) -m pytest -q -s --tenant=10000 tests/kernel/test_random_tenant.py
	$(PYTHON) -m pytest -q --timeout=0 --all-feature-subsets tests/kernel/test_feature_subsets.py

.PHONY: floods
floods: $(STAMP)  ## floods of 400 000 packets, spoofed and answered ones too, in all modes, with tables of the default sizes: ten minutes
	$(PYTHON) -m pytest -q --timeout=0 --flood=400000 tests/kernel/floods/test_floods.py

.PHONY: differential
differential: $(STAMP)  ## 500 new random histories of Services through all backends side by side: half an hour
	$(PYTHON) -m pytest -q --timeout=0 --histories=500 --log-level=ERROR tests/kernel/differential

.PHONY: explained
explained: $(STAMP)  ## 1000 random connections in each mode, as ebpfproxy explain predicts them
	$(PYTHON) -m pytest -q --timeout=0 --explained=1000 tests/kernel/differential/test_explain.py

.PHONY: faults
faults: $(STAMP)  ## 10 000 failing calls into the kernel and 500 kills, and 2500 faults of the API server: ten minutes
	@seed=$${SEED:-$$(date +%s)}; echo "repeat with: make faults SEED=$$seed"; \
	$(PYTHON) -m pytest -q -s --timeout=0 --faults=2500 --kills=125 --faults-seed=$$seed tests/faults

.PHONY: soak
soak: $(STAMP)  ## an hour of changes, and a million connections while agents are killed, the API server is away
	$(CLI) bench churn --connects=0 --seconds=$(SOAK_SECONDS) --rate=50 --services=10000 --changes=100 --source=api
	$(CLI) bench churn --seconds=0 --crash-s=15
	$(CLI) bench churn --seconds=0 --crash-s=15 --replace
	$(CLI) bench churn --seconds=0 --switch-s=20 --modes=$(SOAK_MODES) --from=pod,node,outside
	$(PYTHON) -m pytest -q --timeout=0 --connects=1000000 tests/kernel/test_agent_api.py -k no_connection_fails
	@$(MAKE) --no-print-directory random-node

.PHONY: random-node
random-node: $(STAMP)  ## a million connections while agents restart, modes switch, devices, addresses and routes change; SEED repeats a run
	@seed=$${SEED:-$$(date +%s)}; echo "repeat with: make random-node SEED=$$seed"; \
	$(PYTHON) -m pytest -q -s --timeout=0 --connects=1000000 --faults-seed=$$seed tests/kernel/zoo/test_random_changes.py

.PHONY: bench
bench: $(STAMP)  ## the figures of docs/benchmarks.md, measured here
	$(CLI) bench connect --modes=$(MODES)
	$(CLI) bench sync --modes=$(MODES)
	$(CLI) bench nodeport --modes=$(MODES),ebpf-redirect
	$(CLI) bench nodeport --services=10 --held=200000
	$(CLI) bench packet --modes=$(MODES)

.PHONY: format
format: $(STAMP)  ## put all code into its one form
	$(VENV)/bin/ruff check --fix --quiet .
	$(VENV)/bin/ruff format --quiet .
	$(VENV)/bin/clang-format -i $(C)

.PHONY: clean
clean:  ## remove .venv and all that tools left
	rm -rf $(VENV) dist build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find ebpfproxy tests -name __pycache__ -type d -prune -exec rm -rf {} +
