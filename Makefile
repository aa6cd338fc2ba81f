# make demo   a fresh environment, then the main job on the bundled example
# make test   the same environment with the test extras; ruff, mypy, pytest
# make venv   the environment only
# LIRPA=pypi (default, 0.3) | git (auto_LiRPA's own repository) | PATH (a checkout of yours)

PYTHON ?= python3
TORCH ?= torch==2.13.0
LIRPA ?= pypi
VENV := .venv
BIN := $(VENV)/bin
# one stamp per source of auto_LiRPA: asking for another one installs it over the last
STAMP := $(VENV)/.ready-$(subst /,_,$(subst .,_,$(LIRPA)))

ifeq ($(LIRPA),pypi)
LIRPA_SOURCE := auto_LiRPA==0.3
else ifeq ($(LIRPA),git)
LIRPA_SOURCE := git+https://github.com/Verified-Intelligence/auto_LiRPA.git
else
LIRPA_SOURCE := $(LIRPA)
endif

.PHONY: demo test venv lint clean

demo: $(STAMP)
	$(BIN)/attn-bounds inspect examples/digits_vit.onnx
	$(BIN)/attn-bounds compare examples/digits_vit.onnx --data examples/digits_test.npz --count 10 \
		--norm 2 --eps 0.05 --eps 0.1 --eps 0.15 --threads 1

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	# one thread each: two threads that wait for a core take many times as long
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses=auto --dist=loadfile --durations=10

venv: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test,plot]'
	# without its own requirements, which contradict a current torch
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$(LIRPA_SOURCE)"
	rm -f $(VENV)/.ready-*
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
