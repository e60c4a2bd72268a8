# make            the CPU trainer                    make train   generate stories and learn them (two minutes)
# make test       every test this machine can run    make help    all targets and switches
#
# Needs a C++17 compiler and make. OpenMP is used if a trial build finds it.

CXX      ?= g++
BUILD    := build
CXXFLAGS ?= -O3 -g
# The fastest code for this very processor. `make PORTABLE=1` builds for any processor of this kind instead.
ARCH     := $(if $(PORTABLE),,-march=native)
# -fopenmp-simd honours "#pragma omp simd" with or without OpenMP's threads. No -ffast-math: infinities and NaN count.
# Two switches that change no result: errno after sqrt and floating-point traps, which nobody reads, stop vectorisation.
FLAGS    := -std=c++17 -Wall -Wextra $(CXXFLAGS) -fno-math-errno -fno-trapping-math $(ARCH) -I. $(EXTRA)

# OpenMP: try to build with the usual spellings, g++/clang++ first, then Apple's clang with Homebrew's libomp.
BREW     := $(wildcard /opt/homebrew/opt/libomp /usr/local/opt/libomp)
TRY_OMP   = $(shell printf '\043include <omp.h>\nint main() { return omp_get_max_threads() < 1; }' | \
              $(CXX) -x c++ - $(1) -o /dev/null 2>/dev/null && echo yes)
OPENMP   := $(strip $(if $(NO_OMP),,$(or \
              $(if $(call TRY_OMP,-fopenmp),-fopenmp), \
              $(foreach dir,$(firstword $(BREW)),$(if $(call TRY_OMP,-Xpreprocessor -fopenmp -I$(dir)/include -L$(dir)/lib -lomp), \
                -Xpreprocessor -fopenmp -I$(dir)/include -L$(dir)/lib -lomp)))))
OMPFLAGS := $(if $(OPENMP),$(OPENMP),-fopenmp-simd -Wno-unknown-pragmas)

TESTS := $(patsubst tests/%.cpp,$(BUILD)/%,$(wildcard tests/test_*.cpp))
TEST_SCRIPTS := $(wildcard tests/test_*.py tests/test_*.sh)

.PHONY: all train test help clean found
all: found train_rdattnres_cpu

found:
	@echo "compiler: $(shell $(CXX) --version | head -n 1)"
	@echo "OpenMP:   $(if $(OPENMP),found ($(OPENMP)),not found: one thread; on Debian apt-get install g++, on macOS brew install libomp)"
	@echo "CPU code: $(if $(PORTABLE),portable,for this processor (-march=native); PORTABLE=1 for any)"

# Every program is one source file plus headers; the compiler writes down which (-MMD).
train_rdattnres_cpu: train_rdattnres_cpu.cpp Makefile | $(BUILD)
	$(CXX) $(FLAGS) $(OMPFLAGS) -MMD -MP -MF $(BUILD)/$@.d $< -o $@

data/text_to_shards: data/text_to_shards.cpp Makefile | $(BUILD)
	$(CXX) $(FLAGS) $(OMPFLAGS) -MMD -MP -MF $(BUILD)/text_to_shards.d $< -o $@

$(BUILD)/test_%: tests/test_%.cpp Makefile | $(BUILD)
	$(CXX) $(FLAGS) $(OMPFLAGS) -DFILL_NAN -MMD -MP -MF $@.d $< -o $@

$(BUILD):
	@mkdir -p $@

train: all
	./train_rdattnres_cpu --out runs/tiny $(ARGS)

# Tests start many short programs, some with more threads than cores: threads that wait must not keep a core busy.
test: all data/text_to_shards $(TESTS)
	@OMP_WAIT_POLICY=passive bash tests/run.sh $(TESTS) $(TEST_SCRIPTS)

help:
	@echo "make                    build train_rdattnres_cpu"
	@echo "make train              train the tiny preset on generated stories; ARGS='--seed 2' adds flags"
	@echo "make test               run every test; ends with: N passed, N failed, N skipped"
	@echo "make data/text_to_shards  the tool that turns text into token shards"
	@echo "make clean              remove what was built (runs/ stays)"
	@echo
	@echo "switches: CXX=clang++   PORTABLE=1 (not only this processor)   NO_OMP=1 (one thread)"
	@echo "          CXXFLAGS='-O1 -g -fsanitize=address,undefined'"

clean:
	rm -rf $(BUILD) train_rdattnres_cpu data/text_to_shards

-include $(wildcard $(BUILD)/*.d)
