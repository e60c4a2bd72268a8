# make            the CPU trainer          make train   generate stories and learn them (about a minute)
# make test       what a user needs        make help    all targets and switches
#
# Needs a C++17 compiler and make. OpenMP is used if a trial build finds it.

CXX      ?= g++
COMMA    := ,
BUILD    := build
# Programs are built side by side, one per core.
MAKEFLAGS += -j$(shell getconf _NPROCESSORS_ONLN)
CXXFLAGS ?= -O3 -g
# The fastest code for this very processor. `make PORTABLE=1` builds for any processor of this kind instead.
ARCH     := $(if $(PORTABLE),,-march=native)
# -fopenmp-simd honours "#pragma omp simd" with or without OpenMP's threads. No -ffast-math: infinities and NaN
# count. Two switches that change no result: errno after sqrt and floating-point traps, which nobody reads, stop
# vectorisation.
FLAGS    := -std=c++17 -Wall -Wextra $(CXXFLAGS) -fno-math-errno -fno-trapping-math $(ARCH) -I. $(EXTRA)

# Many processes: make train_rdattnres_cpu MPI=1, make train_rdattnres MPI=1 (dev/doc/ranks.md). The stamp is newer than
# programs that were built the other way.
MPICXX   := OMPI_CXX="$(CXX)" MPICH_CXX="$(CXX)" mpicxx
ifneq ($(MPI),)
  ifeq ($(shell command -v mpicxx),)
    $(error MPI=1: no mpicxx on this machine; on Debian apt-get install libopenmpi-dev openmpi-bin)
  endif
  override CXX := $(MPICXX)
  FLAGS  += -DWITH_MPI
endif
STAMP    := $(BUILD)/mpi
$(shell mkdir -p $(BUILD); echo "MPI=$(MPI)" | cmp -s - $(STAMP) || echo "MPI=$(MPI)" > $(STAMP))

# OpenMP: try to build with the usual spellings, g++/clang++ first, then Apple's clang with Homebrew's libomp.
BREW     := $(wildcard /opt/homebrew/opt/libomp /usr/local/opt/libomp)
LIBOMP    = -Xpreprocessor -fopenmp -I$(1)/include -L$(1)/lib -lomp
TRY_OMP   = $(shell printf '\043include <omp.h>\nint main() { return omp_get_max_threads() < 1; }' | \
              $(CXX) -x c++ - $(1) -o /dev/null 2>/dev/null && echo yes)
OPENMP   := $(strip $(if $(NO_OMP),,$(or \
              $(if $(call TRY_OMP,-fopenmp),-fopenmp), \
              $(foreach dir,$(firstword $(BREW)), \
                $(if $(call TRY_OMP,$(call LIBOMP,$(dir))),$(call LIBOMP,$(dir)))))))
OMPFLAGS := $(if $(OPENMP),$(OPENMP),-fopenmp-simd -Wno-unknown-pragmas)

# Every test program and script. make test leaves out the tests that kill a run again and again; make test_all has
# these, the sanitizers, all builds of the emulator and the fuzz seeds. ONLY=test_model runs one of them.
TESTS    := $(filter-out %/test_fuzz %/test_threads,$(patsubst tests/%.cpp,$(BUILD)/%,$(wildcard tests/test_*.cpp)))
SCRIPTS  := $(wildcard tests/test_*.py tests/test_*.sh)
ASAN     := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined
FUZZERS  := $(addprefix $(BUILD)/fuzz_,shard tokenizer safetensors json log flags)

EMULATOR := $(wildcard dev/emulator/*.cpp dev/emulator/*.h dev/emulator/*.sh dev/emulator/nvtx3/*)
# CUDA code through the emulator (dev/emulator); its fiber switch is written for x86-64.
CUDA_TESTS := $(if $(filter x86_64,$(shell uname -m)),$(patsubst tests/%.cu,$(BUILD)/%,$(wildcard tests/test_*.cu)))

# Those that take longest come first: tests/run.sh starts them in this order, one per core.
SLOW     := %/test_crash %/test_cuda_crash.sh %/test_ranks.py
QUICK    := $(CUDA_TESTS:%=%_fast) $(filter-out $(SLOW),$(SCRIPTS)) $(filter-out $(SLOW),$(TESTS))
FULL     := $(filter-out %/test_emulator_asan,$(foreach build,race asan fast,$(CUDA_TESTS:%=%_$(build)))) \
              $(if $(CUDA_TESTS),$(BUILD)/ladders_race) $(SCRIPTS) $(TESTS:%=%_asan) $(TESTS) $(BUILD)/test_fuzz_asan $(BUILD)/test_threads_tsan
named     = $(filter $(BUILD)/$(ONLY) $(BUILD)/$(ONLY)_% tests/$(ONLY).%,$(1))
chosen    = $(if $(ONLY),$(or $(call named,$(1)),$(call named,$(FULL)), \
              $(error ONLY=$(ONLY): no such test; expected a name such as test_model)),$(1))

# CUDA code for a GPU: the architecture of the card, or GPU_ARCH=90, and its PTX for later ones; or else 8.0 and 9.0.
# nvidia-smi prints its failures on stdout too, so only a version counts.
NVCC     := $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))
CARD     := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
              sed -n '1s/^\([0-9][0-9]*\)\.\([0-9]\)$$/\1\2/p')
GPU_ARCH ?= $(CARD)
TOO_OLD   = $(if $(GPU_ARCH),$(shell [ "$(patsubst %a,%,$(GPU_ARCH))" -ge 80 ] 2>/dev/null || echo yes))
code_for  = -gencode arch=compute_$(1)$(COMMA)code=[$(2)]
GENCODE  := $(if $(GPU_ARCH),$(call code_for,$(GPU_ARCH),sm_$(GPU_ARCH)$(COMMA)compute_$(GPU_ARCH)), \
              $(call code_for,80,sm_80) $(call code_for,90,sm_90$(COMMA)compute_90))
# The loader may not know the toolkit's folder: the program itself says where cuBLASLt is.
TOOLKIT  := $(dir $(realpath $(shell command -v $(NVCC) 2>/dev/null)))..
CUBLAS   := $(patsubst %/,%,$(dir $(firstword $(wildcard $(TOOLKIT)/lib64/libcublasLt.so $(TOOLKIT)/lib/libcublasLt.so))))
# (1675: nvcc's front end does not know the CPU trainer's "GCC unroll", which the tests include.)
NVFLAGS  := -std=c++17 -O3 -I. $(GENCODE) -diag-suppress 1675 -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas \
              $(if $(CUBLAS),-L$(CUBLAS) -Xlinker -rpath=$(abspath $(CUBLAS))) -lcublasLt -ldl \
              $(if $(MPI),-ccbin mpicxx -DWITH_MPI -lnccl) $(NVEXTRA)

.PHONY: all bench bench_gpu train train_emulated test test_all test_gpu fuzz tidy tidy_cpu tidy_cuda ptxas doc paired \
        help clean found need_nvcc
all: found train_rdattnres_cpu

found:
	@echo "compiler: $(shell $(CXX) --version | head -n 1)"
	@echo "OpenMP:   $(if $(OPENMP),found ($(OPENMP)),not found: one thread; on Debian apt-get install g++, on \
	  macOS brew install libomp)"
	@echo "CPU code: $(if $(PORTABLE),portable,for this processor (-march=native); PORTABLE=1 for any)"

# Every program is one source file plus headers; the compiler writes down which (-MMD).
DEPEND    = -MMD -MP -MF $(BUILD)/$(@F).d
COMPILE   = $(CXX) $(FLAGS) $(OMPFLAGS) $(1) $(DEPEND) $< -o $@ $(2)
train_rdattnres_cpu: train_rdattnres_cpu.cpp Makefile $(STAMP) | $(BUILD)
	$(call COMPILE)
$(BUILD)/train_rdattnres_cpu_mpi: train_rdattnres_cpu.cpp Makefile | $(BUILD)
	$(MPICXX) $(FLAGS) -DWITH_MPI $(OMPFLAGS) $(DEPEND) $< -o $@
data/text_to_shards: data/text_to_shards.cpp Makefile | $(BUILD)
	$(call COMPILE)
$(BUILD)/test_%: tests/test_%.cpp Makefile | $(BUILD)
	$(call COMPILE,-DFILL_NAN)

# Two tests start the trainer; their sanitized builds start a sanitized one.
$(BUILD)/train_rdattnres_cpu_asan: train_rdattnres_cpu.cpp Makefile | $(BUILD)
	$(call COMPILE,$(ASAN))
$(BUILD)/test_run_asan $(BUILD)/test_crash_asan: $(BUILD)/train_rdattnres_cpu_asan
$(BUILD)/test_run_asan $(BUILD)/test_crash_asan: FLAGS += -DTRAINER_PATH='"$(BUILD)/train_rdattnres_cpu_asan"'
$(BUILD)/test_%_asan: tests/test_%.cpp Makefile | $(BUILD)
	$(call COMPILE,$(ASAN) -DFILL_NAN)

# The thread sanitizer knows the barriers of clang's OpenMP alone (libomp's Archer).
$(BUILD)/test_%_tsan: tests/test_%.cpp Makefile | $(BUILD)
	clang++ $(FLAGS) -fopenmp -O1 -g1 -fsanitize=thread -Wno-unknown-warning-option $(DEPEND) $< -o $@

$(FUZZERS): $(BUILD)/fuzz_%: tests/fuzz/fuzz.cpp Makefile | $(BUILD)
	clang++ $(FLAGS) -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -DFUZZ_TARGET='"$*"' \
	  $(DEPEND) $< -o $@

# One rule a build: a pattern rule with several targets would take one run of its recipe for all of them.
EMULATE   = bash dev/emulator/build.sh $(1) $< $@ -I. -MT $@ $(DEPEND)
$(BUILD)/test_%_fast: tests/test_%.cu $(EMULATOR) | $(BUILD)
	$(call EMULATE,fast)
$(BUILD)/test_%_asan: tests/test_%.cu $(EMULATOR) | $(BUILD)
	$(call EMULATE,asan)
$(BUILD)/test_%_race: tests/test_%.cu $(EMULATOR) | $(BUILD)
	$(call EMULATE,race)
# Kernel ladders (dev/cuda): the race build checks every rung and counts the bytes it moves.
$(BUILD)/ladders_race: dev/cuda/ladders.cu $(EMULATOR) | $(BUILD)
	$(call EMULATE,race)

$(BUILD)/train_emulated: train_rdattnres.cu $(EMULATOR) | $(BUILD)
	$(call EMULATE,fast)
$(BUILD)/train_emulated_mpi: train_rdattnres.cu $(EMULATOR) | $(BUILD)
	CXX=mpicxx $(call EMULATE,fast) -DWITH_MPI

# Benchmarks: a training step; our half of dev/bench/peers.py; the ladder of the matrix product.
$(BUILD)/bench $(BUILD)/stepper: $(BUILD)/%: dev/bench/%.cpp Makefile | $(BUILD)
	$(call COMPILE)
$(BUILD)/matmul: dev/cpu/matmul.cpp Makefile | $(BUILD)
	$(call COMPILE)
$(BUILD)/matmul_blas: dev/cpu/matmul.cpp Makefile | $(BUILD)
	$(call COMPILE,-DWITH_OPENBLAS,-lopenblas)

bench: $(BUILD)/bench
	$< $(ARGS)

# A trainer takes a flag once, so a target's --flag=value is left out where ARGS has the flag too.
flag_of  = $(firstword $(subst =, ,$(1)))
in_args  = $(filter $(1) $(1)=%,$(ARGS))
or_args  = $(foreach given,$(1),$(if $(call in_args,$(call flag_of,$(given))),,$(given))) $(ARGS)

# A small sibling of the tiny preset: every CUDA thread is played by the CPU, so a step takes seconds.
SMALL   := --layers=2 --width=64 --heads=2 --ffn=96 --context=64 --batch=4 --steps=20 --warmup=2 \
             --val-every=10 --val-tokens=1024 --sample-tokens=0 --out=runs/emulated
train_emulated: $(BUILD)/train_emulated
	$< $(call or_args,$(SMALL))

COMPILE_CUDA = $(NVCC) $(NVFLAGS) $(DEPEND) $< -o $@
train_rdattnres: train_rdattnres.cu Makefile $(STAMP) | need_nvcc $(BUILD)
	$(COMPILE_CUDA)
$(BUILD)/test_%_gpu: tests/test_%.cu Makefile | need_nvcc $(BUILD)
	$(COMPILE_CUDA)
$(BUILD)/ladders_gpu: dev/cuda/ladders.cu Makefile | need_nvcc $(BUILD)
	$(COMPILE_CUDA)

need_nvcc:
	$(if $(NVCC),,$(error no nvcc on this machine: install the CUDA Toolkit, or put its bin folder into PATH; the \
	  CPU trainer (make) and the emulator (make train_emulated) need neither))
	$(if $(TOO_OLD),$(error GPU_ARCH=$(GPU_ARCH): needs 8.0 or newer, written as GPU_ARCH=80))

$(BUILD):
	@mkdir -p $@

train: all
	./train_rdattnres_cpu $(call or_args,--out=runs/tiny)

# Tests start many short programs, some with more threads than cores: threads that wait must not keep a core
# busy.
RUN_TESTS = OMP_WAIT_POLICY=passive bash tests/run.sh
# What a list of tests needs besides itself: the programs, and for three scripts trainers of other kinds.
needs     = $(filter $(BUILD)/%,$(1)) all data/text_to_shards $(if $(filter tests/test_cuda_%.sh,$(1)), \
              $(if $(CUDA_TESTS),$(BUILD)/train_emulated $(BUILD)/test_run $(BUILD)/test_crash)) \
              $(if $(filter tests/test_ranks.py,$(1)),$(if $(shell command -v mpicxx), \
              $(BUILD)/train_rdattnres_cpu_mpi $(if $(CUDA_TESTS),$(BUILD)/train_emulated $(BUILD)/train_emulated_mpi)))
test: $(call needs,$(call chosen,$(QUICK)))
	@$(RUN_TESTS) $(call chosen,$(QUICK))
test_all: $(call needs,$(call chosen,$(FULL)))
	@$(RUN_TESTS) $(call chosen,$(FULL))

# libFuzzer on everything that reads files or text, FUZZ_SECONDS each; what it finds stays in build/fuzz.
fuzz: $(if $(shell command -v clang++),$(FUZZERS) $(BUILD)/test_fuzz_asan)
	@bash tests/fuzz/run.sh $(or $(FUZZ_SECONDS),60) $(FUZZERS)

# clang-tidy with .clang-tidy: what goes wrong with index arithmetic. The CUDA file goes through the emulator's
# headers, without the analyzer, which takes minutes there.
tidy: tidy_cpu tidy_cuda
tidy_cpu:
	clang-tidy --quiet train_rdattnres_cpu.cpp data/text_to_shards.cpp -- -std=c++17 -I. -Wno-unknown-pragmas
tidy_cuda:
	clang-tidy --quiet --checks='-clang-analyzer-*' train_rdattnres.cu -- \
	  -x c++ -std=c++17 -Idev/emulator -I. -Wno-unknown-pragmas

# The same CUDA tests on a real card.
GPU_TESTS := $(BUILD)/test_cuda_layers_gpu $(BUILD)/test_cuda_model_gpu
test_gpu: all $(GPU_TESTS) $(BUILD)/test_run $(BUILD)/test_crash train_rdattnres
	@nvidia-smi -L || { echo "no GPU: these tests need one; make test runs them through the emulator"; exit 1; }
	@CUDA_TRAINER=./train_rdattnres bash tests/run.sh $(GPU_TESTS) tests/test_cuda_run.sh tests/test_cuda_crash.sh

# Every rung of every kernel ladder, checked and timed on a real card: a table, and a JSON line each in
# bench_gpu.jsonl.
bench_gpu: need_nvcc
	@nvidia-smi -L 2>/dev/null || \
	  { echo "no GPU: times need one. Without: make $(BUILD)/ladders_race && $(BUILD)/ladders_race"; exit 1; }
	@$(MAKE) $(BUILD)/ladders_gpu
	$(BUILD)/ladders_gpu $(ARGS)

# Registers, spills and shared memory of every kernel; fails if one that training spends its time in spills.
ptxas: train_rdattnres.cu | need_nvcc
	$(NVCC) $(NVFLAGS) -Xptxas -v -c $< -o /dev/null 2>&1 | python3 dev/ptxas.py

# The paired experiment in small: two arms, report and pictures, in a minute.
paired: all
	rm -rf runs/paired/smoke
	python3 dev/paired/run.py dev/paired/studies/smoke.json --jobs 2 --threads 1
	python3 dev/paired/analyse.py dev/paired/studies/smoke.json --results runs/paired/smoke/results
	python3 dev/paired/plot.py --results runs/paired/smoke/results --if-possible

doc:
	python3 dev/doc/depth_memory.py

help:
	@echo "make                    build train_rdattnres_cpu"
	@echo "make train              train the tiny preset on generated stories; ARGS='--seed 2' adds flags"
	@echo "make test               what a user needs; ends with: N passed, N failed, N skipped; ONLY=test_model: one"
	@echo "make test_all           every test: sanitizers, all builds of the emulator, fuzz seeds, crash loops"
	@echo "make fuzz               libFuzzer on every reader of files and flags, a minute each; FUZZ_SECONDS=600"
	@echo "make tidy               clang-tidy: index arithmetic and mistakes of that kind"
	@echo "make data/text_to_shards  the tool that turns text into token shards"
	@echo "make train_rdattnres    the CUDA trainer; needs nvcc. GPU_ARCH=90 names the architecture; default: the card's"
	@echo "make train_emulated     the CUDA trainer without a GPU: a very small run; ARGS='--steps 3' changes it"
	@echo "make test_gpu           the CUDA tests on a real card"
	@echo "make ptxas              registers, spills, shared memory of the kernels; needs nvcc and python3"
	@echo "make paired             the paired experiment in small: runs, report, pictures; needs python3"
	@echo "make doc                the picture of the depth memory, made again"
	@echo "make bench              tokens/s, share of peak, memory of a training step; ARGS='small rd,block'"
	@echo "make bench_gpu          the kernel ladders of dev/cuda on a real card; ARGS='adamw'"
	@echo "make clean              remove what was built (runs/ stays)"
	@echo
	@echo "switches: CXX=clang++   PORTABLE=1 (not only this processor)   NO_OMP=1 (one thread)"
	@echo "          MPI=1 (the trainers for many processes, dev/doc/ranks.md; needs mpicxx, and NCCL for the GPU)"
	@echo "          CXXFLAGS='-O1 -g -fsanitize=address,undefined'"

clean:
	rm -rf $(BUILD) train_rdattnres_cpu train_rdattnres data/text_to_shards

-include $(wildcard $(BUILD)/*.d)
