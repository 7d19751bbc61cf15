# make            builds ./flexgen with what this machine has, and says what that is
# make run        completes a few prompts with the shipped model
# make test       builds and runs every CUnit suite; make test SUITE=lp runs one
# make sanitize   all suites under ASan and UBSan, the engine's under ThreadSanitizer
# make bench      measured figures beside their bounds
# make format, make clean
CFLAGS ?= -O3 -march=native
WARN := -std=c11 -Wall -Wextra -Werror -D_GNU_SOURCE
BUILD ?= build
OPENMP ?= $(shell echo 'int main(void){return 0;}' | $(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo -fopenmp)
ISA := $(shell echo | $(CC) $(CFLAGS) -dM -E - 2>/dev/null | awk '/__AVX512F__/{a=1}/__AVX2__/{b=1}/__F16C__/{c=1}END{print a?"AVX-512":b&&c?"AVX2":"portable C"}')
NVCC := $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
ALL := $(CFLAGS) $(WARN) $(OPENMP) $(SANITIZE) -MMD -MP
LIBS := -lcjson -lpcre2-8 -lm -lpthread

SRC := $(filter-out flexgen.c,$(wildcard *.c))
OBJ := $(SRC:%.c=$(BUILD)/%.o)
TESTS := $(sort $(wildcard tests/test_*.c))
TEST_OBJ := $(TESTS:%.c=$(BUILD)/%.o) $(BUILD)/tests/main.o
SUITES := $(foreach t,$(TESTS),X($(patsubst tests/test_%.c,%,$(t))))
# what a fresh Debian lacks: a header to look for, the package that has it
NEED := cjson/cJSON.h:libcjson-dev pcre2.h:libpcre2-dev CUnit/CUnit.h:libcunit1-dev
MODEL := models/opt-tiny

all: flexgen
	@echo "flexgen: host device, $(ISA), $(if $(OPENMP),OpenMP,no OpenMP: one thread), $(if $(NVCC),nvcc found ($(NVCC)) but no CUDA device in this version,no nvcc)"

flexgen: $(BUILD)/flexgen
	@cp $< $@

$(BUILD)/flexgen: $(OBJ) $(BUILD)/flexgen.o
	$(CC) $(ALL) $^ -o $@ $(LIBS)

$(BUILD)/%.o: %.c | setup
	@mkdir -p $(@D)
	$(CC) $(ALL) -c $< -o $@

$(BUILD)/tests/main.o: ALL += -DSUITES="$(SUITES)"
$(BUILD)/tests/main.o: $(TESTS)

$(BUILD)/run_tests: $(OBJ) $(TEST_OBJ)
	$(CC) $(ALL) $^ -o $@ $(LIBS) -lcunit

# Installs what is missing when run as root, or prints the one command that does.
setup:
	@scripts/setup.sh "$(CC)" $(NEED)

run: all
	./flexgen generate --model $(MODEL) --prompts models/prompts.txt --max-tokens 120 --temperature 0.7 --top-p 0.9 --seed 3

test: flexgen $(BUILD)/run_tests
	$(BUILD)/run_tests $(SUITE)

# Frames and checks instead of speed. OpenMP's runtime is not instrumented, so it is off; address layout randomization confuses TSan.
CHECKED := CFLAGS="-O1 -g -fno-omit-frame-pointer -march=native" OPENMP=
TSAN_SUITES := schedule
sanitize:
	$(MAKE) --no-print-directory BUILD=build/asan $(CHECKED) SANITIZE="-fsanitize=address,undefined -fno-sanitize-recover=undefined" \
	    build/asan/run_tests build/asan/flexgen
	FLEXGEN_BIN=build/asan/flexgen build/asan/run_tests $(SUITE)
	$(MAKE) --no-print-directory BUILD=build/tsan $(CHECKED) SANITIZE=-fsanitize=thread build/tsan/run_tests
	for suite in $(TSAN_SUITES); do TSAN_OPTIONS=halt_on_error=1 setarch -R build/tsan/run_tests $$suite || exit 1; done

# Programs of their own, with their own main.
BENCH := $(patsubst tests/%.c,$(BUILD)/%,$(wildcard tests/bench_*.c))
bench: flexgen $(BENCH)
	@scripts/bench.sh $(BUILD)

$(BENCH): $(BUILD)/%: $(BUILD)/tests/%.o $(BUILD)/host.o
	$(CC) $(ALL) $^ -o $@ -lm -lpthread -ldl

clean:
	rm -rf build flexgen

format:
	clang-format -i *.c *.h tests/*.c tests/*.h

-include $(wildcard $(BUILD)/*.d $(BUILD)/tests/*.d)
.PHONY: all setup run test sanitize bench format clean
.DELETE_ON_ERROR:
