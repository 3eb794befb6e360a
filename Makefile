# Works with GNU make 3.81, which macOS has. What needs more than a line is in scripts/.
#
#   PORT, BROWSER        for `make lab`
#   PYTHON               the Python that .venv is made with
#   PINNED, TORCH_INDEX  see scripts/install.sh
#   JOBS                 tests at once (2)
#   RUN                  a Python that has everything already; nothing is installed then (a GPU box without a network)

RUN =
VENV_PYTHON = .venv/bin/python
RUN_PYTHON = $(if $(RUN),$(RUN),$(VENV_PYTHON))
install = $(if $(RUN),@echo "labkit: using $(RUN) as it is",@sh scripts/install.sh $(1))
export PORT BROWSER PYTHON PINNED TORCH_INDEX JOBS

.PHONY: help lab test test-gpu sanitize notebooks format clean

help:
	@echo "make lab         install into .venv and open the lessons   (PORT=8899 BROWSER=0 on a box without a screen)"
	@echo "make test        install into .venv and run every test that a CPU can run"
	@echo "make test-gpu    the tests marked gpu, and every notebook, on the GPU"
	@echo "make sanitize    every GPU kernel under compute-sanitizer: memory, then races"
	@echo "make notebooks   run every notebook and store its outputs"
	@echo "make format      format the code and mend what ruff can mend"
	@echo "make clean       remove .venv and caches"

lab:
	$(call install,lab)
	@exec $(RUN_PYTHON) scripts/lab.py

test:
	$(call install,test lab)
	@sh scripts/test.sh $(RUN_PYTHON) cpu

test-gpu:
	$(call install,test lab)
	@sh scripts/test.sh $(RUN_PYTHON) gpu

sanitize:
	$(call install,test)
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 $(RUN_PYTHON) -m tests.gpu.small_shapes
	compute-sanitizer --tool racecheck --error-exitcode 1 $(RUN_PYTHON) -m tests.gpu.small_shapes

notebooks:
	$(call install,lab)
	$(RUN_PYTHON) -m labkit.lab.execute notebooks

format:
	$(call install,test lab)
	$(RUN_PYTHON) -m ruff check --fix .
	$(RUN_PYTHON) -m ruff format .

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
