# Two commands for a new user: `make demo` and `make test`. Each installs what it needs into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Two sets of packages: what the demo needs, and everything else (Ray, bitsandbytes, TensorBoard, test tools).
DEMO_INSTALLED := $(VENV)/.installed-demo
INSTALLED := $(VENV)/.installed
# Without bytecode: pip would compile 14,000 files one after the other, of which the demo imports 3,000. Python compiles
# those on first import, and the tests' packages are compiled in parallel.
PIP_INSTALL := $(BIN)/pip install -q --no-compile
# Liger and Triton, apart from all other packages: tests run the kernels in Triton's interpreter, in processes of their
# own, and nothing else should find a Triton.
LIGER := $(VENV)/liger

# A local S3 server for tests of buckets, apart as well: it runs as a process of its own.
S3 := $(VENV)/s3

# What tests of many hosts, of Slurm and of pages use; without root, tests of hosts and Slurm are skipped, and say so.
TEST_PACKAGES := iproute2 openssh-server openssh-client pdsh munge slurmctld slurmd slurm-client chromium fonts-liberation

.PHONY: demo test quick fuzz check audit format generate lock clean test-packages

demo: $(DEMO_INSTALLED)
	$(BIN)/toolkit train recipes/demo.yaml --nproc 2

# Containers often set it. Then every process that a test starts would compile the toolkit again, for a second of CPU.
test quick: export PYTHONDONTWRITEBYTECODE =

# Two files at a time: tests wait for processes to start, to time out and to end more than they compute.
test: $(INSTALLED) $(LIGER) $(S3) test-packages
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations 25

# Without the tests that take long.
quick: $(INSTALLED) test-packages
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

# Ten minutes of random files for every reader of files, two readers at a time.
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --seconds 600

# Known vulnerabilities of the pinned packages; fails if there are any. In an environment of its own: pip-audit's own
# dependencies would change what is pinned.
audit:
	@{ $(PYTHON) -m venv $(VENV)-audit && $(VENV)-audit/bin/pip install -q pip-audit; } >/dev/null 2>&1 \
		|| { echo "pip-audit was NOT run: the package index does not answer" >&2; exit 0; }; \
	$(VENV)-audit/bin/pip-audit -r constraints.txt --no-deps --disable-pip --progress-spinner off > $(VENV)-audit/found 2>&1; \
	code=$$?; missing=$$(grep -c "could not be audited" $(VENV)-audit/found || true); \
	if [ $$code -gt 1 ]; then echo "pip-audit was NOT run: its index does not answer" >&2; exit 0; fi; \
	grep -v "could not be audited" $(VENV)-audit/found; \
	if [ $$missing -gt 0 ]; then echo "pip-audit: $$missing packages are not in the index and were NOT audited" >&2; fi; \
	exit $$code

# Vulnerabilities are reported here, and fail `make audit`: one that is published today must not stop a fix.
check: $(INSTALLED)
	-@$(MAKE) -s audit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(INSTALLED)
	$(BIN)/python -m toolkit.generate

# On Debian as root: installed, without starting any service. Elsewhere: left alone.
test-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg -s $(TEST_PACKAGES) >/dev/null 2>&1; then \
		apt-get update -q && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
			$(TEST_PACKAGES) \
		|| echo "not all of $(TEST_PACKAGES) could be installed: tests that need them are skipped, and say so"; \
	fi

# The hashes of packages, after a change of constraints.txt.
lock: $(INSTALLED)
	$(BIN)/python .ci/lock.py

clean:
	rm -rf $(VENV) $(VENV)-audit build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# On Debian `python3 -m venv` needs the package python3-venv: installed where we may, asked for where not.
# What one wheel serves on all machines is checked against its hash; torch, the largest, comes beside the others.
$(DEMO_INSTALLED): pyproject.toml constraints.txt .ci/hashes-demo.txt .ci/hashes-rest.txt
	$(PYTHON) -m venv $(VENV) || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update -q && apt-get install -qy python3-venv && $(PYTHON) -m venv $(VENV); \
	} || { echo "python3-venv is missing: install it (apt-get install python3-venv), then try again" >&2; exit 1; }
	$(PIP_INSTALL) --no-deps -c constraints.txt torch & torch=$$!; \
	$(PIP_INSTALL) --no-deps --require-hashes -r .ci/hashes-demo.txt && wait $$torch
	$(PIP_INSTALL) -c constraints.txt -e .
	touch $@

# Not in constraints.txt: CUDA builds of torch bring a Triton of their own.
$(LIGER): $(INSTALLED)
	$(BIN)/pip install -q --no-deps --target $@ liger-kernel==0.8.5 triton==3.9.0

$(S3): $(INSTALLED)
	$(PIP_INSTALL) --target $@ 'moto[s3]==5.2.5' flask==3.1.3 flask-cors==6.0.5

$(INSTALLED): $(DEMO_INSTALLED)
	$(PIP_INSTALL) --no-deps --require-hashes -r .ci/hashes-rest.txt
	$(PIP_INSTALL) -c constraints.txt -e '.[dev,gpu,islands,lora,qlora,ray,report,tensorboard,vision]'
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	touch $@
