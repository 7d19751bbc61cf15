# make            builds ./flexgen with what this machine has, and says what that is; make GPU="75 80 90" for other GPUs than the one here
# make mini       builds ./mini, the whole paper in one file: mini.c; with nvcc and a GPU, or GPU=75, also mini.cu, its half for the card
# make install    puts the program, with hardware/ and a manual page, below PREFIX=/usr/local; make uninstall removes it; DESTDIR= for packages
# make run        completes a few prompts with the shipped model
# make test       builds and runs every CUnit suite; make test SUITE=lp runs one
# make grade EX=1 the points of an exercise of docs/EXERCISES.md; make exercises checks all of them
# make gpu-tests  the engine's and the kernels' suites on a real GPU
# make sanitize   all suites under ASan and UBSan, the engine's and the network's under ThreadSanitizer; make sanitize PART=tsan
# make tape OUT=DIR  every op that the engine's suites post, as a record; scripts/tape.py compares those of two trees
# make fuzz       damaged inputs for everything that is read, under ASan and UBSan; make fuzz N=1000000 SEED=1
# make bench      measured figures beside their bounds
# make accuracy   what compression and sparse attention cost, in perplexity
# make paper      the paper's evaluation again, into results/paper; make paper GPU=1 also measures on the GPU that is here
# make experiments  all studies of docs/EXPERIMENTS.md, compared with what it says
# make docs       four pages: the tour with the three schedules as an animation, docs/index.html; the paper beside the code,
#                 docs/paper.html; the slides of the six lectures, docs/slides.html; the manual page, docs/flexgen.1
# make booklet    the second as build/paper.pdf, to be printed; needs chromium
# make explore    the policy search in a browser: docs/explore.html; needs emscripten, and CJSON= the path of cJSON's source
# make size       tokens of each file and of the trunk, budgets (scripts/size.txt), and that calls go down only
# make format, make clean
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += -j$(shell echo $$((1 + $$(nproc 2>/dev/null || echo 2)))) # one more than processors, since suites also wait for disks and slow links
endif
# gives back a flag that the compiler takes
takes = $(shell $(CC) $1 -E -x c /dev/null >/dev/null 2>&1 && echo $1)
# compilers for ARM's Macs call this processor otherwise
NATIVE := $(or $(call takes,-march=native),-mcpu=native)
# Where two calls get the same struct on the stack, such as a Tensor, gcc 12 with AVX-512 may store it once, for the first of them,
# although the return address of a call between the two has overwritten it. With this flag no return address lies there.
ARGS := $(call takes,-maccumulate-outgoing-args)
CFLAGS ?= -O3 $(NATIVE)
# WERROR= is for other compilers, which warn of other things; SETUP= for machines where nothing can be installed
WERROR ?= -Werror
SETUP ?= setup
# clang says of some small loops that there was nothing to unroll
WARN := -std=c11 -Wall -Wextra -Wshadow $(WERROR) -Wno-pass-failed -D_GNU_SOURCE
BUILD ?= build
ISA := $(shell echo | $(CC) $(CFLAGS) -dM -E - 2>/dev/null | awk '/__AVX512BW__/{a=1}/__AVX2__/{b=1}/__F16C__/{c=1}/__ARM_NEON /{d=1}END{print a&&c?"AVX-512":b&&c?"AVX2":d?"NEON":"portable C"}')
# for a Mac, whose libraries are Homebrew's
MAC := $(shell echo | $(CC) -dM -E - 2>/dev/null | grep -o __APPLE__)
BREW := $(if $(MAC),$(shell brew --prefix 2>/dev/null))
ALL = $(CFLAGS) $(ARGS) $(WARN) $(SANITIZE) -I. $(BREW:%=-I%/include) -MMD -MP
LIBS := $(BREW:%=-L%/lib) -lcjson -lm -lpthread -ldl

# The CUDA toolkit: nvcc and cuBLAS build the device for GPUs, the headers alone its emulation on the CPU for the tests.
NVCC := $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA_ROOT := $(patsubst %/bin/nvcc,%,$(NVCC))
CUDA_INCLUDE := $(patsubst %/cublasLt.h,%,$(firstword $(wildcard $(CUDA_HOME)/include/cublasLt.h $(CUDA_ROOT)/include/cublasLt.h /usr/local/cuda/include/cublasLt.h)))
CUDA_LIB := $(patsubst %/libcublasLt.so,%,$(firstword $(wildcard $(foreach l,lib64 lib/*-linux-gnu lib targets/*/lib,$(CUDA_ROOT)/$l/libcublasLt.so))))
HAVE_CXX := $(shell command -v $(CXX) 2>/dev/null)
CUDA := $(and $(NVCC),$(CUDA_INCLUDE),$(CUDA_LIB),$(HAVE_CXX))
# the GPU that is here; else the oldest that serves, whose PTX the driver compiles for any later one when it is first run
HERE = $(or $(subst .,,$(shell PATH=$$PATH:/usr/lib/wsl/lib nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x '[0-9]*[.][0-9]*' | sort -u)),75)
GPU ?= $(HERE)
ifneq ($(CUDA),)
WANTED := $(if $(filter 1,$(GPU)),$(HERE),$(GPU))
SERVED := $(filter-out 72 87,$(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code))) # those two are boards' own
# a GPU that is newer than nvcc is served by the PTX of the newest that nvcc knows
ARCHS := $(filter $(WANTED) $(if $(filter-out $(SERVED),$(WANTED)),$(lastword $(SERVED))),$(SERVED))
GENCODE := $(foreach a,$(ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_$(lastword $(ARCHS)),code=compute_$(lastword $(ARCHS))
# nvcc gives the toolkit's headers to the compiler as the user's own, so a warning of theirs is an error only where it is asked for
NVWARN := -Xptxas --warn-on-spills -Xcompiler -Wall,-Wextra,-Wshadow $(if $(NVWERROR),-Xcompiler -Werror -Werror all-warnings)
CUDA_OBJ := $(BUILD)/flexgen.cu.o
CUDA_SO := $(BUILD)/flexgen_cuda.so
CUDA_LIBS := -L$(CUDA_LIB) -Wl,-rpath,$(CUDA_LIB) -lcublasLt -lcudart_static -ldl -lrt
endif

# MPI, for pipelines of machines, is a library beside the program too. MPICC= leaves it out.
MPICC ?= $(shell command -v mpicc 2>/dev/null)
MPI_SO := $(if $(MPICC),$(BUILD)/flexgen_mpi.so)

SRC := $(filter-out flexgen.c mini.c device/pipeline.c,$(wildcard *.c) $(filter-out tests/% docs/%,$(wildcard */*.c)))
OBJ := $(SRC:%.c=$(BUILD)/%.o)
# in a starter tree (scripts/exercise.sh): what comes without its source
GIVEN := $(wildcard kit/given/*.o)
GIVEN_MINI := $(wildcard kit/given/mini/*.o)
LIB := $(BUILD)/libflexgen.a
# what a fresh computer lacks: a header to look for, the package of Debian that has it
NEED := cjson/cJSON.h:libcjson-dev CUnit/CUnit.h:libcunit1-dev
MODEL := models/opt-tiny

all: flexgen
	@echo "flexgen: host device, $(ISA), $(if $(CUDA),cuda device for $(ARCHS:%=sm_%),no cuda device: $(if $(NVCC),$(if $(CUDA_LIB),no C++ compiler,no cuBLAS),no nvcc)), $(if $(MPICC),MPI,no MPI: no mpicc)"

# The program and, where there are CUDA and MPI, the libraries for them, which the program loads from beside it.
flexgen: $(BUILD)/flexgen $(CUDA_SO) $(MPI_SO)
	@rm -f flexgen flexgen_cuda.so flexgen_mpi.so; cp $^ .

# the library uses functions of the program: -rdynamic
$(BUILD)/flexgen: $(BUILD)/flexgen.o $(LIB) | $(CUDA_SO)
	$(CC) $(ALL) -rdynamic $^ -o $@ $(LIBS)
$(BUILD)/flexgen_cuda.so: $(CUDA_OBJ)
	$(CXX) -shared $^ -o $@ $(CUDA_LIBS) -lpthread
$(BUILD)/flexgen_mpi.so: device/pipeline.c
	@mkdir -p $(@D)
	OMPI_CC="$(CC)" $(MPICC) $(ALL) -fPIC -shared $(if $(MAC),-undefined dynamic_lookup) $< -o $@ -lm -lpthread

# the architectures are part of what it depends on
$(BUILD)/flexgen.cu.o: flexgen.cu device/tensor_core.h device/parts.h device/device.h device/ops.h plan.h flexgen.h quant.h base/base.h base/simd.h $(BUILD)/archs
	@echo "nvcc -O3 $< for $(ARCHS:%=sm_%)"
	@$(NVCC) -std=c++17 -O3 -I. --threads 0 $(GENCODE) $(NVWARN) -Xcompiler -fPIC -c $< -o $@
$(BUILD)/archs: always
	@mkdir -p $(@D); echo '$(NVCC) $(ARCHS)' | cmp -s - $@ || echo '$(NVCC) $(ARCHS)' >$@

$(BUILD)/%.o: %.c | $(SETUP)
	@mkdir -p $(@D)
	$(CC) $(ALL) -c $< -o $@

$(LIB): $(OBJ) $(GIVEN)
	@rm -f $@; $(AR) rcs $@ $^

# The whole stack may have 128 KiB (suite memory); under a sanitizer a function takes more of it.
$(OBJ) $(BUILD)/flexgen.o: WARN += $(if $(SANITIZE),,-Wframe-larger-than=65536)

# Installs what is missing when run as root, or prints the one command that does.
setup:
	@scripts/setup.sh "$(CC) $(BREW:%=-I%/include)" $(NEED)

# The whole paper in one file, which shares nothing with the engine: cc -O3 mini.c -lm -lpthread -o mini
# Where a GPU is, or is asked for: nvcc -O3 -DGPU mini.c mini.cu -lcublas -o mini
CARD = $(and $(CUDA),$(or $(filter command,$(origin GPU)),$(shell PATH=$$PATH:/usr/lib/wsl/lib nvidia-smi -L 2>/dev/null)))
mini: mini.c mini.cu
	$(if $(CARD),$(NVCC) -O3 -DGPU $(GENCODE) $(NVWARN) $(addprefix -Xcompiler ,$(NATIVE)) $^ $(GIVEN_MINI) -o $@ -L$(CUDA_LIB) -Xlinker -rpath=$(CUDA_LIB) -lcublas,\
	    $(CC) $(CFLAGS) -Wall -Wextra $(WERROR) $(SANITIZE) $< $(GIVEN_MINI) -o $@ -lm -lpthread)

# The program looks for its libraries and hardware/ in its own folder. That of the link, bin, belongs to others, too.
PREFIX ?= /usr/local
INTO = $(DESTDIR)$(PREFIX)
install: $(BUILD)/flexgen $(CUDA_SO) $(MPI_SO)
	rm -rf "$(INTO)/lib/flexgen"
	install -d "$(INTO)/bin" "$(INTO)/lib/flexgen/hardware" "$(INTO)/share/man/man1"
	install $^ "$(INTO)/lib/flexgen"
	install -m 644 hardware/*.json "$(INTO)/lib/flexgen/hardware"
	install -m 644 docs/flexgen.1 "$(INTO)/share/man/man1"
	ln -sf ../lib/flexgen/flexgen "$(INTO)/bin/flexgen"
uninstall:
	rm -rf "$(INTO)/lib/flexgen" "$(INTO)/bin/flexgen" "$(INTO)/share/man/man1/flexgen.1"

run: all
	./flexgen generate --model $(MODEL) --prompts models/prompts.txt --max-tokens 120 --temperature 0.7 --top-p 0.9 --seed 3

include tests/suites.mk # make test, gpu-tests and sanitize

# Programs of their own, with their own main.
$(BUILD)/bench_gpu.o: tests/bench_gpu.cu device/parts.h device/device.h device/ops.h flexgen.h plan.h $(BUILD)/archs
	$(NVCC) -std=c++17 -O2 -I. $(GENCODE) $(NVWARN) -c $< -o $@
$(BUILD)/bench_gpu: $(BUILD)/bench_gpu.o $(CUDA_OBJ) $(LIB)
	$(CXX) $^ -o $@ $(CUDA_LIBS) $(LIBS)
HOST := $(patsubst %.c,$(BUILD)/%.o,$(wildcard device/host*.c) base/team.c base/os.c device/depend.c device/ops.c)
BENCH := $(patsubst tests/%.c,$(BUILD)/%,$(filter-out $(if $(MAC),tests/bench_machine.c),$(wildcard tests/bench_*.c)))
test: $(if $(SANITIZE)$(SUITE),,$(BENCH) $(if $(MAC),,$(BUILD)/tape)) # no suite runs them, and they must compile
bench: flexgen $(BENCH)
	@scripts/bench.sh $(BUILD)

$(BENCH): $(BUILD)/%: $(BUILD)/tests/%.o $(HOST) $(BUILD)/quant.o
	$(CC) $(ALL) $^ -o $@ -lm -lpthread -ldl

accuracy: flexgen
	@scripts/accuracy.sh $(BUILD)

paper: flexgen
	@GPU=$(filter 1,$(GPU)) python3 -B scripts/paper.py

experiments: flexgen
	@python3 -B scripts/experiments.py --check

size: flexgen
	@python3 -B scripts/size.py $(BUILD)

docs: flexgen
	@python3 -B scripts/make_page.py
	@python3 -B scripts/paper_page.py
	@python3 -B scripts/slides.py
	@python3 -B scripts/make_man.py
booklet:
	@python3 -B scripts/paper_page.py --pdf $(BUILD)/paper.pdf

# The whole program as WebAssembly, and the page that asks it. cJSON's source, cJSON.c: `apt-get source cjson`.
WASM := $(BUILD)/wasm
EMCC := emcc -O3 -msimd128 $(WARN) -Wno-pass-failed -I. -I$(WASM) -MMD -MP
explore: $(WASM)/flexgen.js
	@python3 -B scripts/make_explore.py $(WASM)
$(WASM)/flexgen.js: $(patsubst %.c,$(WASM)/%.o,$(SRC) flexgen.c docs/explore.c) $(WASM)/cJSON.o
	NODE_PATH="$(NODE_PATH):/usr/share/nodejs" emcc -O3 $^ -o $@ -sMODULARIZE -sEXPORT_NAME=flexgen -sINVOKE_RUN=0 -sALLOW_MEMORY_GROWTH \
		-sEXPORTED_RUNTIME_METHODS=callMain,FS -sENVIRONMENT=web,worker,node
$(WASM)/%.o: %.c | $(WASM)/cjson/cJSON.h
	@mkdir -p $(@D)
	$(EMCC) -c $< -o $@
$(WASM)/cJSON.o: $(CJSON) | $(WASM)/cjson/cJSON.h
	emcc -O3 -c $(CJSON) -o $@
$(WASM)/cjson/cJSON.h:
	@test -f "$(CJSON)" || { echo "make explore CJSON=PATH: the path of cJSON.c, such as of apt-get source cjson" >&2; exit 1; }
	@mkdir -p $(@D) && cp $(dir $(CJSON))cJSON.h $@

clean:
	rm -rf build flexgen mini flexgen_cuda.so flexgen_mpi.so

format:
	clang-format -i *.c *.h *.cu */*.c */*.h tests/*.cu tests/*.cpp docs/project/*.[ch]

-include $(wildcard $(BUILD)/*.d $(BUILD)/*/*.d $(BUILD)/*/*/*.d)
.SECONDARY: # what a pattern rule made on the way stays
.PHONY: all setup install uninstall run bench accuracy paper experiments size docs booklet explore format clean always
.DELETE_ON_ERROR:
