# `make demo` and `make test` in a fresh clone do their own set-up. The interpreter is, in this order: PYTHON=..., the
# active virtual environment, a `python` or `python3` that has a supported torch and may be installed into, else a
# virtual environment made here, .venv. A torch in the supported range (pyproject.toml) stays as it is.
TORCH ?= torch==2.13.0
# A list of requirements in pyproject.toml, as words of the shell.
requirements = $(shell sed -n 's/^$(1) = \[\([^]]*\)\].*/\1/p' pyproject.toml | sed 's/", "/" "/g')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Python programs that exit with 0 for "yes".
HAS_TORCH := import re, importlib.metadata as m; \
  n = lambda s: [int(x) for x in re.findall(r"\d+", s)[:2]]; \
  low, high = re.search("torch>=([0-9.]+),<([0-9.]+)", open("pyproject.toml").read()).groups(); \
  raise SystemExit(not n(low) <= n(m.version("torch")) < n(high))
MAY_INSTALL := import os, sys, sysconfig; \
  raise SystemExit(sys.version_info < (3, 10) or sys.prefix == sys.base_prefix and \
  os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")))
IS_NEW_ENOUGH := import sys; sys.version_info < (3, 10) and sys.exit("torch_moe_ep needs Python 3.10 or newer")

ifndef PYTHON
  ifdef VIRTUAL_ENV
    PYTHON := $(VIRTUAL_ENV)/bin/python
  else
    PYTHON := $(shell for p in python python3; do \
      $$p -c '$(MAY_INSTALL)' 2>/dev/null && $$p -c '$(HAS_TORCH)' 2>/dev/null && echo $$p && break; done)
    ifeq ($(PYTHON),)
      PYTHON := .venv/bin/python
    endif
  endif
endif
PREFIX := $(shell $(PYTHON) -c 'import sys; print(sys.prefix)' 2>/dev/null || echo $(CURDIR)/.venv)
# One stamp per environment; pyvenv.cfg is younger than it when the environment has been made anew.
INSTALLED := build/installed-$(shell printf %s '$(PREFIX)' | cksum | cut -d' ' -f1)

.PHONY: help python install build demo test bench lint sdist wheel clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*  ## /\1\t/p' Makefile | expand -t 10

python:  ## the interpreter that the other targets use
	@echo $(PYTHON)

.venv/bin/python:
	python3 -c '$(IS_NEW_ENOUGH)'
	python3 -m venv .venv || { rm -rf .venv; exit 1; }

$(INSTALLED): pyproject.toml $(filter .venv/bin/python,$(PYTHON)) $(wildcard $(PREFIX)/pyvenv.cfg)
	@mkdir -p build
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m ensurepip
	@$(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null || { set -x; $(PYTHON) -m pip install '$(TORCH)'; }
	$(PYTHON) -m pip install -q $(call requirements,requires) $(call requirements,test) $(call requirements,transformers)
	$(PYTHON) setup.py build_ext --inplace
	$(PYTHON) -m pip install -q --no-build-isolation -e .
	@touch $@

install: $(INSTALLED)  ## torch if there is none, what building and testing need, and this package, editable

build: $(INSTALLED)  ## install, then compile what has changed
	@$(PYTHON) setup.py -q build_ext --inplace

demo: build  ## a compiled MoE decoder over several processes, checked against one process
	$(PYTHON) -m torch_moe_ep.demo $(ARGS)

test: build  ## the tests; ARGS="-k name" and the like go to pytest
	$(PYTHON) -m pytest $(ARGS)

BENCH ?= cpu_pair
bench: build  ## a benchmark, BENCH=cpu_pair unless told otherwise; see benchmarks/README.md
	$(PYTHON) -m benchmarks.$(BENCH) $(ARGS)

lint: $(INSTALLED)  ## the linters, on every file that git knows; formats in place
	$(PYTHON) -m pip install -q $(call requirements,lint)
	PATH="$(PREFIX)/bin:$$PATH" $(PYTHON) -m pre_commit run --all-files

sdist: $(INSTALLED)  ## dist/*.tar.gz
	@$(PYTHON) -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' >/dev/null
	@ls -t dist/*.tar.gz | head -n 1

wheel: $(INSTALLED)  ## dist/*.whl
	$(PYTHON) -m pip wheel --no-build-isolation --no-deps -w dist .

clean:  ## everything that was built here, .venv included
	rm -rf build dist .venv *.egg-info torch_moe_ep/*.so
