# make            builds ./flexgen with what this machine has, and says what that is; make GPU="75 80 90" for other GPUs than the one here
# make run        completes a few prompts with the shipped model
# make test       builds and runs every CUnit suite; make test SUITE=lp runs one
# make gpu-tests  the engine's and the kernels' suites on a real GPU
# make sanitize   all suites under ASan and UBSan, the engine's under ThreadSanitizer
# make bench      measured figures beside their bounds
# make accuracy   what compression and sparse attention cost, in perplexity
# make format, make clean
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell nproc 2>/dev/null || echo 2)
endif
CFLAGS ?= -O3 -march=native
WARN := -std=c11 -Wall -Wextra -Werror -D_GNU_SOURCE
BUILD ?= build
OPENMP ?= $(shell echo 'int main(void){return 0;}' | $(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo -fopenmp)
ISA := $(shell echo | $(CC) $(CFLAGS) -dM -E - 2>/dev/null | awk '/__AVX512F__/{a=1}/__AVX2__/{b=1}/__F16C__/{c=1}END{print a?"AVX-512":b&&c?"AVX2":"portable C"}')
ALL = $(CFLAGS) $(WARN) $(OPENMP) $(SANITIZE) -I. -MMD -MP
LIBS := -lcjson -lpcre2-8 -lm -lpthread

# The CUDA toolkit: nvcc and cuBLAS build the device for GPUs, the headers alone its emulation on the CPU for the tests.
NVCC := $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA_ROOT := $(patsubst %/bin/nvcc,%,$(NVCC))
CUDA_INCLUDE := $(patsubst %/cublasLt.h,%,$(firstword $(wildcard $(CUDA_HOME)/include/cublasLt.h $(CUDA_ROOT)/include/cublasLt.h /usr/local/cuda/include/cublasLt.h)))
CUDA_LIB := $(patsubst %/libcublasLt.so,%,$(firstword $(wildcard $(CUDA_ROOT)/lib64/libcublasLt.so $(CUDA_ROOT)/lib/*-linux-gnu/libcublasLt.so)))
HAVE_CXX := $(shell command -v $(CXX) 2>/dev/null)
CUDA := $(and $(NVCC),$(CUDA_INCLUDE),$(CUDA_LIB),$(HAVE_CXX))
# the GPU that is here; else the oldest that serves, whose PTX the driver compiles for any later one when it is first run
GPU ?= $(or $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u)),75)
ifneq ($(CUDA),)
ARCHS := $(filter $(GPU),$(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code)))
GENCODE := $(foreach a,$(ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_$(lastword $(ARCHS)),code=compute_$(lastword $(ARCHS))
CUDA_OBJ := $(BUILD)/flexgen.cu.o
CUDA_LIBS := -L$(CUDA_LIB) -Wl,-rpath,$(CUDA_LIB) -lcublasLt -lcudart_static -ldl -lrt
endif
EMULATION := $(and $(CUDA_INCLUDE),$(HAVE_CXX),$(filter x86_64,$(shell uname -m)))

SRC := $(filter-out flexgen.c,$(wildcard *.c) $(filter-out tests/%,$(wildcard */*.c)))
OBJ := $(SRC:%.c=$(BUILD)/%.o)
LIB := $(BUILD)/libflexgen.a
SUITES := $(sort $(patsubst tests/test_%.c,%,$(wildcard tests/test_*.c)))
HARNESS := $(BUILD)/tests/main.o $(BUILD)/tests/fixture.o
$(if $(filter-out $(SUITES),$(SUITE)),$(error no such suite: $(SUITE); the suites are: $(SUITES)))
# what a fresh Debian lacks: a header to look for, the package that has it
NEED := cjson/cJSON.h:libcjson-dev pcre2.h:libpcre2-dev CUnit/CUnit.h:libcunit1-dev
MODEL := models/opt-tiny

all: flexgen
	@echo "flexgen: host device, $(ISA), $(if $(OPENMP),OpenMP,no OpenMP: one thread), $(if $(CUDA),cuda device for $(ARCHS:%=sm_%),no cuda device: $(if $(NVCC),$(if $(CUDA_LIB),no C++ compiler,no cuBLAS),no nvcc))"

flexgen: $(BUILD)/flexgen
	@cp $< $@

$(BUILD)/flexgen: $(BUILD)/flexgen.o $(CUDA_OBJ) $(LIB)
	$(if $(CUDA),$(CXX) $(OPENMP) $(SANITIZE),$(CC) $(ALL)) $^ -o $@ $(CUDA_LIBS) $(LIBS)

# the architectures are part of what it depends on
$(BUILD)/flexgen.cu.o: flexgen.cu flexgen.h device/device.h check.h lp.h quant.h util.h $(BUILD)/archs
	@echo "nvcc -O3 $< for $(ARCHS:%=sm_%)"
	@$(NVCC) -std=c++17 -O3 -I. --threads 0 $(GENCODE) -Xcompiler -Wall,-Wextra,-Werror -Werror all-warnings -c $< -o $@
$(BUILD)/archs: always
	@mkdir -p $(@D); echo '$(NVCC) $(ARCHS)' | cmp -s - $@ || echo '$(NVCC) $(ARCHS)' >$@

$(BUILD)/%.o: %.c | setup
	@mkdir -p $(@D)
	$(CC) $(ALL) -c $< -o $@

$(LIB): $(OBJ)
	@rm -f $@; $(AR) rcs $@ $^

# Installs what is missing when run as root, or prints the one command that does.
setup:
	@scripts/setup.sh "$(CC)" $(NEED)

run: all
	./flexgen generate --model $(MODEL) --prompts models/prompts.txt --max-tokens 120 --temperature 0.7 --top-p 0.9 --seed 3

# A suite is a program, build/test_NAME, and a log of its own, which ends with its exit status and seconds. The tests wait for the product
# more than for themselves, so that -O1 will do for them.
$(SUITES:%=$(BUILD)/tests/test_%.o) $(HARNESS): CFLAGS += -O1
$(BUILD)/test_%: $(BUILD)/tests/test_%.o $(HARNESS) $(LIB)
	$(CC) $(ALL) $^ -o $@ $(LIBS) -lcunit
$(BUILD)/%.log: $(BUILD)/test_% always
	@scripts/suite.sh $@ $(RUNNER) $<
$(BUILD)/cli.log: $(BUILD)/flexgen $(if $(EMULATION),$(BUILD)/flexgen_emulated)
$(BUILD)/cli.log: export FLEXGEN_BIN := $(BUILD)/flexgen
$(BUILD)/cli.log: export FLEXGEN_EMULATED := $(if $(EMULATION),$(BUILD)/flexgen_emulated)

LOGS := $(patsubst %,$(BUILD)/%.log,$(filter-out $(if $(EMULATION),cuda),$(or $(SUITE),$(SUITES))))
EMULATED := $(if $(EMULATION),$(if $(SUITE),$(filter cuda,$(SUITE)),cuda schedule lanes))
ORDERED_LOGS := $(foreach way,reverse random,$(EMULATED:%=$(BUILD)/$(way)/%.log))
CHECKED_LOGS := $(foreach way,asan tsan,$(EMULATED:%=build/$(way)/emulated/%.log))
test: $(if $(EMULATED),tsan asan) $(LOGS) $(ORDERED_LOGS)
	@scripts/summary.sh $(LOGS) $(ORDERED_LOGS) $(CHECKED_LOGS)

$(BUILD)/gpu/test_%: $(BUILD)/tests/test_%.o $(HARNESS) $(CUDA_OBJ) $(LIB)
	@mkdir -p $(@D)
	$(CXX) $(OPENMP) $^ -o $@ $(CUDA_LIBS) $(LIBS) -lcunit
$(BUILD)/gpu/%.log: $(BUILD)/gpu/test_% always
	@scripts/suite.sh $@ $<
gpu-tests: $(patsubst %,$(BUILD)/gpu/%.log,cuda schedule lanes)
	@scripts/summary.sh $^

# The cuda device on the CPU: flexgen.cu as C++, with tests/cuda_cpu.h in the place of the CUDA runtime and cuBLAS.
$(BUILD)/flexgen_cpu.cpp: flexgen.cu tests/cuda2cpp.sed
	@mkdir -p $(@D)
	(echo '#line 1 "flexgen.cu"'; sed -E -f tests/cuda2cpp.sed $<) >$@
$(BUILD)/flexgen_cpu.o: $(BUILD)/flexgen_cpu.cpp tests/cuda_cpu.h
	$(CXX) -std=c++17 $(CFLAGS) $(SANITIZE) -Wall -Wextra -Werror -Wno-unknown-pragmas -fno-strict-aliasing -MMD -MP -I. -isystem $(CUDA_INCLUDE) -include tests/cuda_cpu.h -c $< -o $@
$(BUILD)/flexgen_emulated: $(BUILD)/flexgen.o $(BUILD)/flexgen_cpu.o $(LIB)
	$(CXX) $(OPENMP) $(SANITIZE) $^ -o $@ $(LIBS)
PLAIN := $(BUILD)
DEVICE := lanes arena disk op depend # what is built anew where the rest is the plain one's
$(BUILD)/emulated/test_%: $(BUILD)/flexgen_cpu.o $(DEVICE:%=$(BUILD)/device/%.o) $(PLAIN)/tests/test_%.o $(PLAIN)/tests/main.o $(PLAIN)/tests/fixture.o $(PLAIN)/libflexgen.a
	@mkdir -p $(@D)
	$(CXX) $(OPENMP) $(SANITIZE) $^ -o $@ $(LIBS) -lcunit

# Four ways, since no single one sees everything. The slower a way, the fewer of the engine's combinations it takes: every so many-th,
# which is an odd number, or the lists' inner loops would never turn.
#   reverse  blocks and threads that rely on running before others; calls that CUDA refuses, leaks
#   random   the same, and copies that arrive later than what needs them
#   asan     with UBSan: reads and writes outside of what was allocated, shared memory included
#   tsan     missing barriers, missing waits between streams and with the host
$(BUILD)/reverse/%.log: $(BUILD)/emulated/test_% always
	@scripts/suite.sh $@ CUDA_CPU_ORDER=reverse CUDA_CPU_STRICT=1 $< --every 25
$(BUILD)/random/%.log: $(BUILD)/emulated/test_% always
	@scripts/suite.sh $@ CUDA_CPU_ORDER=random CUDA_CPU_GBPS=0.05 $< --every 25
$(BUILD)/emulated/%.log: $(BUILD)/emulated/test_% always
	@scripts/suite.sh $@ $(RUNNER) $< --every $(EVERY)

# Frames and checks instead of speed. OpenMP's runtime is not instrumented, so TSan has none; address layout randomization confuses it.
CHECKED := CFLAGS="-O1 -g -fno-omit-frame-pointer -march=native"
ASAN := BUILD=build/asan $(CHECKED) SANITIZE="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
TSAN := BUILD=build/tsan $(CHECKED) SANITIZE=-fsanitize=thread OPENMP= RUNNER="TSAN_OPTIONS=halt_on_error=1 setarch -R"
asan: $(LIB) $(HARNESS) $(EMULATED:%=$(BUILD)/tests/test_%.o) # only the device is built for it, the rest is the plain one's
	@$(MAKE) --no-print-directory $(ASAN) PLAIN=$(BUILD) EVERY=49 $(EMULATED:%=build/asan/emulated/%.log)
tsan:
	@$(MAKE) --no-print-directory $(TSAN) EVERY=383 $(EMULATED:%=build/tsan/emulated/%.log)
sanitize:
	@$(MAKE) --no-print-directory $(ASAN) CUDA= EMULATION= test
	@$(MAKE) --no-print-directory $(TSAN) EMULATION= SUITE="$(or $(SUITE),schedule lanes)" test

# Programs of their own, with their own main.
$(BUILD)/bench_gpu: tests/bench_gpu.cu $(BUILD)/archs
	$(NVCC) -std=c++17 -O2 $(GENCODE) -Xcompiler -Wall,-Wextra,-Werror -Werror all-warnings -c $< -o $@.o
	$(CXX) $@.o -o $@ $(CUDA_LIBS)
BENCH := $(patsubst tests/%.c,$(BUILD)/%,$(wildcard tests/bench_*.c))
bench: flexgen $(BENCH)
	@scripts/bench.sh $(BUILD)

$(BENCH): $(BUILD)/%: $(BUILD)/tests/%.o $(BUILD)/device/host.o $(BUILD)/quant.o
	$(CC) $(ALL) $^ -o $@ -lm -lpthread -ldl

accuracy: flexgen
	@scripts/accuracy.sh $(BUILD)

clean:
	rm -rf build flexgen

format:
	clang-format -i *.c *.h *.cu */*.c */*.h tests/*.cu

-include $(wildcard $(BUILD)/*.d $(BUILD)/*/*.d)
.SECONDARY: # what a pattern rule made on the way stays
.PHONY: all setup run test gpu-tests asan tsan sanitize bench accuracy format clean always
.DELETE_ON_ERROR:
