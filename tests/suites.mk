# suites.mk: how the tests are built and run; the Makefile includes it.
#
# A suite, tests/test_NAME.c, becomes a program of its own, $(BUILD)/test_NAME, and running it a log, $(BUILD)/NAME.log. So suites run
# while others are still being compiled, and a crash is one suite's. `make test` makes all logs and puts them together; it takes
# four minutes on two processors. What takes longer is in `make sanitize`:
#   all suites on the host device under AddressSanitizer and UBSan, the engine's and the network's under ThreadSanitizer;
#   the emulated cuda device under both with more combinations, and with everything instrumented, not the device alone.
SUITES := $(patsubst tests/test_%.c,%,$(sort $(wildcard tests/test_*.c)))
$(if $(filter-out $(SUITES),$(SUITE)),$(error no such suite: $(SUITE); the suites are: $(SUITES)))
# of these `make test` has all: faults loads a library of its own, exercises and project compile, mini has programs with sanitizers of its own
SUITES := $(if $(SANITIZE),$(filter-out faults exercises mini project,$(SUITES)),$(SUITES))
LONGEST := schedule cli exercises mini tour project # which begin first
SUITES := $(filter $(LONGEST),$(SUITES)) $(filter-out $(LONGEST),$(SUITES))
# These want Linux: its /proc and its system calls. A Mac runs the others; its `brew install coreutils` has the command timeout.
LINUX := cli completions emulation exercises faults files gpu grade kill memory mini paper pipeline project quantize rehearsal schedule search summary tour world
SUITES := $(filter-out $(if $(MAC),$(LINUX)),$(SUITES))
# The emulation of a GPU needs the CUDA toolkit's headers; where they are not, the suite `cuda` is counted as skipped.
EMULATION := $(and $(CUDA_INCLUDE),$(HAVE_CXX),$(filter x86_64,$(shell uname -m)))
CUDA_SUITES := cuda schedule lanes stages
# those that run on the emulation too
EMULATED := $(if $(EMULATION),$(filter $(or $(SUITE),$(CUDA_SUITES)),$(CUDA_SUITES)))
LOGS := $(patsubst %,$(BUILD)/%.log,$(filter-out $(if $(EMULATION),cuda),$(filter $(or $(SUITE),$(SUITES)),$(SUITES))))
PLAIN := $(BUILD)
HARNESS = $(patsubst %,$(PLAIN)/tests/%.o,main fixture written local_net $(if $(MAC),,started))

# Where python3 is a script that looks for the interpreter, as pyenv's is, a start takes three times as long as the interpreter's own.
ifneq ($(filter test exercises,$(MAKECMDGOALS)),)
PYTHON_DIR := $(shell python3 -c 'import os, sys; print(os.path.dirname(sys.executable))' 2>/dev/null)
export PATH := $(if $(filter-out $(subst :, ,$(PATH)),$(PYTHON_DIR)),$(PYTHON_DIR):)$(PATH)
endif

# The tests wait for the product more than for themselves, so that -O0 will do for them; but `host` and `cuda` compute what they compare with,
# `events` and `pipeline` look at each byte, and all draw their data from fixture.c.
$(SUITES:%=$(BUILD)/tests/test_%.o) $(patsubst %,$(BUILD)/tests/%.o,main local_net started answers): CFLAGS += -O0
$(patsubst %,$(BUILD)/tests/%.o,test_host test_cuda test_events test_pipeline fixture): CFLAGS += -O2
# mini.c runs a whole model; -O3 takes three times as long to compile
$(patsubst %,$(BUILD)/tests/%.o,exam_mini exam_lp): CFLAGS += -O1
$(BUILD)/test_%: $(BUILD)/tests/test_%.o $(HARNESS) $(LIB)
	$(CC) $(ALL) $(WRAP) $^ -o $@ $(LIBS) -lcunit $(if $(MAC),-undefined dynamic_lookup)
$(BUILD)/test_grade: $(BUILD)/tests/answers.o $(BUILD)/tests/squares.o
$(BUILD)/test_grade $(BUILD)/exam_engine: WRAP := -Wl,--wrap=host_run,--wrap=post
# The exams that it asks, which are programs of their own (tests/exam.c), here with the code that is there.
EXAMS := $(patsubst %,$(BUILD)/%,exam_engine exam_lp exam_mini $(if $(EMULATION),emulated/exam_kernels emulated/exam_tiles))
$(BUILD)/exam_engine: $(patsubst %,$(BUILD)/tests/%.o,exam exam_engine squares lessons fixture) $(LIB)
	$(CC) $(ALL) $(WRAP) $^ -o $@ $(LIBS) -lcunit
$(BUILD)/exam_lp $(BUILD)/exam_mini: $(BUILD)/exam_%: $(BUILD)/tests/exam.o $(BUILD)/tests/exam_%.o
	$(CC) $(ALL) $^ -o $@ -lm -lpthread
$(BUILD)/emulated/exam_kernels: $(BUILD)/flexgen_cpu.o $(BUILD)/cuda_cpu.o $(patsubst %,$(BUILD)/tests/%.o,exam exam_kernels fixture) $(LIB)
	@mkdir -p $(@D)
	$(CXX) $(SANITIZE) -rdynamic $^ -o $@ $(LIBS) -lcunit
# The kernels of mini.cu, and mini.c, which they call.
$(BUILD)/emulated/exam_tiles: tests/mini_kernels.cpp $(patsubst %,$(BUILD)/tests/%.o,exam exam_tiles) $(BUILD)/cuda_cpu.o $(BUILD)/mini_cpu.cpp mini.c tests/mini_kernels.h tests/cuda_cpu.h
	@mkdir -p $(@D)
	$(CC) $(DEVICE_O) $(SANITIZE) -DGPU -Dmain=mini_main -Wall -Wextra $(WERROR) -c mini.c -o $@.c.o
	$(CXX) -std=c++17 $(DEVICE_O) $(SANITIZE) -DGPU $(NATIVE) -DCUDA_CPU_TABLE=0 -DMINI_CU='"$(BUILD)/mini_cpu.cpp"' -Wall -Wextra $(WERROR) -Wno-unknown-pragmas \
	    -Wno-unused-function -fno-strict-aliasing -I. -isystem $(CUDA_INCLUDE) -include tests/cuda_cpu.h $< $(filter %.o,$^) $@.c.o -o $@ -rdynamic -lm -lpthread -ldl
$(BUILD)/grade.log: $(EXAMS)
$(BUILD)/grade.log $(BUILD)/mini.log: export GRADE_EXAMS := $(BUILD)
$(BUILD)/%.log: $(BUILD)/test_% always
	@scripts/suite.sh $@ $(RUNNER) $< $(FLAGS)
# Of these the cases take turns, others with each commit; a suite that is asked for by its name takes all.
TURNS := events faults kill memory mini paper pipeline project tour
export TEST_TURN := $(or $(TEST_TURN),$(if $(filter test,$(MAKECMDGOALS)),$(shell git log -1 --format=%ct 2>/dev/null)))
$(TURNS:%=$(BUILD)/%.log): FLAGS := $(if $(SUITE)$(SANITIZE),,--every 2)
$(BUILD)/tour.log: FLAGS := $(if $(SUITE)$(SANITIZE),,--every 3)
# of their long lists; all of them in `make sanitize`
$(BUILD)/schedule.log: FLAGS := $(if $(SANITIZE),,--every 5)
$(BUILD)/stages.log: FLAGS := $(if $(SANITIZE),,--every 3)
$(BUILD)/search.log: FLAGS := $(if $(SANITIZE),,--every 2)
$(BUILD)/world.log: FLAGS := $(if $(SANITIZE),,--every 4)
# A suite that fails fails its log, which stays. Where there is a summary, it fails in their place, when all have run.
.PRECIOUS: $(foreach way,reverse/ random/ emulated/ gpu/,$(BUILD)/$(way)%.log) $(BUILD)/%.log
test emulated gpu-tests: export GOING_ON := 1
# The program for the suites that start it. flexgen_host has no library for GPUs beside it. That of flexgen_emulated is the emulation; a
# stub stands for NVIDIA's driver.
PROGRAMS := $(BUILD)/flexgen_host $(if $(EMULATION),$(BUILD)/flexgen_emulated)
STARTING := $(patsubst %,$(BUILD)/%.log,cli files paper gpu memory kill faults tour mini project)
$(BUILD)/flexgen_host $(BUILD)/flexgen_emulated: $(BUILD)/flexgen.o $(LIB)
	$(CC) $(ALL) -rdynamic $^ -o $@ $(LIBS)
$(BUILD)/flexgen_emulated_cuda.so: $(BUILD)/flexgen_cpu.o $(BUILD)/cuda_cpu.o
	$(CXX) $(SANITIZE) -shared $^ -o $@
$(BUILD)/flexgen_emulated: | $(BUILD)/flexgen_emulated_cuda.so
$(BUILD)/driver/libcuda.so.1: tests/driver.c
	@mkdir -p $(@D)
	$(CC) -shared -fPIC $< -o $@
$(STARTING): $(PROGRAMS) $(BUILD)/driver/libcuda.so.1
$(STARTING): export FLEXGEN_BIN := $(BUILD)/flexgen_host
ifneq ($(EMULATION),)
$(STARTING): export FLEXGEN_EMULATED := $(BUILD)/flexgen_emulated
endif
$(STARTING): export FLEXGEN_DRIVER := $(abspath $(BUILD)/driver)
$(BUILD)/cli.log: export LD_LIBRARY_PATH := $(abspath $(BUILD)/driver)
$(BUILD)/test_pipeline: LIBS += -rdynamic # the library for MPI uses functions of its program
$(BUILD)/pipeline.log: $(BUILD)/flexgen_host
$(BUILD)/pipeline.log: export FLEXGEN_BIN := $(BUILD)/flexgen_host
# The library for MPI, beside the programs that a test starts as stages of a pipeline.
STAGES := $(BUILD)/flexgen_host $(BUILD)/test_pipeline
$(STAGES): | $(if $(MPI_SO),$(STAGES:%=%_mpi.so))
$(STAGES:%=%_mpi.so): $(MPI_SO)
	cp $< $@
# The suite `faults` loads a library before the program, which a sanitizer's own runtime does not allow.
$(BUILD)/faults.so: tests/faults.c
	$(CC) -O1 $(WARN) -shared -fPIC $< -o $@ -ldl
$(BUILD)/faults.log: $(BUILD)/faults.so
$(BUILD)/faults.log: export FAULTS_LIBRARY := $(BUILD)/faults.so
# mini.c beside the engine: as a reader builds it, and with sanitizers.
$(BUILD)/mini: mini.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -Wall -Wextra $(WERROR) $(SANITIZE) $< -o $@ -lm -lpthread
# with sums in another order than any CFLAGS give
$(BUILD)/mini_portable: mini.c
	@mkdir -p $(@D)
	$(CC) -O3 -fassociative-math -fno-signed-zeros -fno-trapping-math $< -o $@ -lm -lpthread
$(BUILD)/mini_asan: CHECKS := address,undefined -fno-sanitize-recover=undefined
$(BUILD)/mini_tsan: CHECKS := thread
$(BUILD)/mini_asan $(BUILD)/mini_tsan: mini.c
	@mkdir -p $(@D)
	$(CC) -O2 -g1 -fno-omit-frame-pointer $(NATIVE) -fsanitize=$(CHECKS) $< -o $@ -lm -lpthread
# with mini.cu, whose kernels are C++ for the emulation of a GPU
$(BUILD)/mini_cpu.cpp: mini.cu tests/cuda2cpp.sed
	@mkdir -p $(@D)
	(echo '#line 1 "mini.cu"'; sed -E -f tests/cuda2cpp.sed $<) >$@
EMULATED_MINI = -O2 -DGPU $(NATIVE) $(CHECKS)
define emulated_mini
	$(CC) $(EMULATED_MINI) -Wall -Wextra $(WERROR) -c mini.c -o $@.c.o
	$(CXX) -std=c++17 $(EMULATED_MINI) -DCUDA_CPU_TABLE=0 -Wall -Wextra $(WERROR) -Wno-unknown-pragmas -fno-strict-aliasing -I. \
	    -isystem $(CUDA_INCLUDE) -include tests/cuda_cpu.h $< $@.c.o $(RUNTIME) -o $@ -rdynamic -lm -lpthread -ldl
endef
$(BUILD)/mini_emulated: CHECKS :=
$(BUILD)/mini_emulated_asan: CHECKS := -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined
$(BUILD)/mini_emulated_tsan: CHECKS := -g1 -fsanitize=thread
# What has sanitizers of its own, or none beside others that have, compiles the runtime for itself.
$(BUILD)/mini_emulated $(BUILD)/planted: RUNTIME := $(if $(SANITIZE),tests/cuda_cpu.cpp,$(BUILD)/cuda_cpu.o)
$(BUILD)/mini_emulated_asan $(BUILD)/mini_emulated_tsan $(BUILD)/planted_tsan: RUNTIME := tests/cuda_cpu.cpp
$(BUILD)/mini_emulated $(BUILD)/planted: $(if $(SANITIZE),,$(BUILD)/cuda_cpu.o)
$(patsubst %,$(BUILD)/%,mini_emulated mini_emulated_asan mini_emulated_tsan planted planted_tsan): tests/cuda_cpu.cpp
$(BUILD)/mini_emulated $(BUILD)/mini_emulated_asan $(BUILD)/mini_emulated_tsan: $(BUILD)/mini_cpu.cpp mini.c tests/cuda_cpu.h
	$(emulated_mini)
# mini.c, which rounds to F16 what it multiplies
$(BUILD)/mini_rounded: mini.c
	@mkdir -p $(@D)
	sed 's/^    Product a = .*/    for (long e = 0; e < (long)rows * w->cols; e++) { f16 h; narrow(\&h, x + e, 1); widen((float *)x + e, \&h, 1); }\n&/' $< | \
	    $(CC) -O2 $(NATIVE) -x c - -o $@ -lm -lpthread
ifneq ($(EMULATION),)
$(BUILD)/mini.log $(BUILD)/gpu.log: $(BUILD)/mini_emulated
$(BUILD)/mini.log: $(BUILD)/mini_rounded $(BUILD)/test_grade $(BUILD)/emulated/exam_tiles
$(BUILD)/mini.log: export MINI_GRADER := $(BUILD)/test_grade
$(BUILD)/mini.log $(BUILD)/gpu.log: export MINI_EMULATED := $(BUILD)/mini_emulated
ifdef MINI_ALL
$(BUILD)/mini.log: $(BUILD)/mini_emulated_asan $(BUILD)/mini_emulated_tsan
$(BUILD)/mini.log: export MINI_EMULATED_ASAN := $(BUILD)/mini_emulated_asan
$(BUILD)/mini.log: export MINI_EMULATED_TSAN := $(BUILD)/mini_emulated_tsan
endif
$(BUILD)/mini.log: export MINI_ROUNDED := $(BUILD)/mini_rounded
endif
$(BUILD)/mini.log: $(BUILD)/mini $(BUILD)/mini_portable $(BUILD)/mini_asan $(BUILD)/mini_tsan $(BUILD)/faults.so
$(BUILD)/tour.log $(BUILD)/gpu.log: $(BUILD)/mini
$(BUILD)/mini.log $(BUILD)/tour.log $(BUILD)/gpu.log: export MINI_BIN := $(BUILD)/mini
$(BUILD)/mini.log: export MINI_PORTABLE := $(BUILD)/mini_portable
$(BUILD)/mini.log: export MINI_ASAN := $(BUILD)/mini_asan
$(BUILD)/mini.log: export MINI_TSAN := $(BUILD)/mini_tsan
$(BUILD)/mini.log: export FAULTS_LIBRARY := $(BUILD)/faults.so
# Every case of that suite, which takes a quarter of an hour.
mini-all:
	@MINI_ALL=1 SUITE_SECONDS=1700 $(MAKE) --no-print-directory SUITE=mini test

$(BUILD)/gpu/test_%: $(BUILD)/tests/test_%.o $(HARNESS) $(CUDA_OBJ) $(LIB)
	@mkdir -p $(@D)
	$(CXX) $^ -o $@ $(CUDA_LIBS) $(LIBS) -lcunit
$(BUILD)/gpu/%.log: $(BUILD)/gpu/test_% always
	@scripts/suite.sh $@ $<
gpu-tests: $(patsubst %,$(BUILD)/gpu/%.log,$(CUDA_SUITES))
	@scripts/summary.sh $^

# make tape OUT=DIR: every op of the engine's suites and of random policies, for scripts/tape.py; see tests/tape.c.
TAPED := schedule events stages
$(BUILD)/tape: $(TAPED:%=$(BUILD)/tests/test_%.o) $(BUILD)/tests/tape.o $(HARNESS) $(LIB)
	$(CC) $(ALL) -Wl,--wrap=schedule_run $^ -o $@ $(LIBS) -lcunit
tape: $(BUILD)/tape
	@mkdir -p $(or $(OUT),$(error make tape OUT=DIR: the folder that the tape is written to))
	@OUT=$(OUT) FULL="$(FULL)" $(BUILD)/tape >$(OUT)/log 2>&1; status=$$?; LC_ALL=C sort $(OUT)/unsorted >$(OUT)/index; rm $(OUT)/unsorted; \
	if test $$status != 0; then grep -v passed $(OUT)/log; exit $$status; fi

# make grade EX=N: the points of exercise N of docs/EXERCISES.md, in a starter tree by its kit, here by one that is made (scripts/exercise.py).
# make exercises: whether all can be done, in the weeks of docs/TEACHING.md, too, and mistakes are seen; with EX="1 2" these alone; without
# it also the commands of docs/DEBUGGING.md, and a hostile course (scripts/grade_all.sh). What is about a kernel needs the emulation.
KERNELS := 12 18 20
export CUDA_INCLUDE
grade exercises: | $(SETUP)
grade:
	@test -d kit || python3 -B scripts/exercise.py kit "$(EX)"
	@python3 -B scripts/exam.py "$(EX)"
GRADABLE = $(filter-out $(if $(EMULATION),,$(KERNELS)),$(shell sed -n 's/^exercise \([0-9]*\).*/\1/p' scripts/exercises.txt))
# Every third of them, the others with other commits; of one suite alone all. 12 and 18 are kernels of one file, which takes long to compile.
$(BUILD)/exercises.log: export SAMPLE = $(if $(SUITE),$(filter-out 18,$(GRADABLE)),$(shell printf '%s\n' $(filter-out 18,$(GRADABLE)) | \
    awk -v turn=$(or $(TEST_TURN),0) 'NR % 3 == turn % 3'))
exercises:
	$(if $(EMULATION),,@echo "exercises $(KERNELS) are left out: the CUDA toolkit's headers are not here")
	@python3 -B scripts/exercise.py check $(or $(EX),$(GRADABLE))
	$(if $(EX),,@python3 -B scripts/exercise.py debugging)
	$(if $(EX),,@python3 -B scripts/exercise.py course $(if $(EMULATION),,nokernels))
	$(if $(EX),,@python3 -B scripts/grade_all.py --hostile)

# The judge of docs/PROJECT.md, with copies of two files that it reaches into; with sums in any order, since it computes whole models.
$(BUILD)/project_judge: tests/project_judge.c tests/project_judge.h docs/project/ask.h docs/project/project.h opt_model.c device/sim.c $(LIB)
	@mkdir -p $(@D)/judge
	sed 's/^    plain_attention(/    judged_attention(/; s/checkpoint_floats(/judged_floats(/' opt_model.c >$(@D)/judge/model.c
	sed 's/= op_seconds(d, op, moved, len) +/= judged_share(op) * op_seconds(d, op, moved, len) +/' device/sim.c >$(@D)/judge/sim.c
	$(CC) $(filter-out -MMD -MP,$(ALL)) -fassociative-math -fno-signed-zeros -fno-trapping-math -Idocs/project -include device/ops.h -include tests/project_judge.h $< $(@D)/judge/model.c $(@D)/judge/sim.c $(LIB) -o $@ $(LIBS)
$(BUILD)/project.log: $(BUILD)/project_judge
$(BUILD)/project.log: export PROJECT_JUDGE := $(BUILD)/project_judge

# The cuda device on the CPU: flexgen.cu as C++, with tests/cuda_cpu.h and cuda_cpu.cpp in the place of the CUDA runtime and cuBLAS. It is
# the code for sm_80, and in flexgen_cpu_75.o that for sm_75.
$(BUILD)/flexgen_cpu.cpp: flexgen.cu tests/cuda2cpp.sed
	@mkdir -p $(@D)
	(echo '#line 1 "flexgen.cu"'; sed -E -f tests/cuda2cpp.sed $<) >$@
# Under ASan -O2 takes half of the time of -O1 for running, and under TSan the same.
DEVICE_O ?= $(if $(filter -fsanitize=thread,$(SANITIZE)),-O1,-O2)
$(BUILD)/flexgen_cpu_75.o: ARCH := -D__CUDA_ARCH__=750
$(BUILD)/flexgen_cpu.o $(BUILD)/flexgen_cpu_75.o: $(BUILD)/flexgen_cpu.cpp tests/cuda_cpu.h
$(BUILD)/cuda_cpu.o: tests/cuda_cpu.cpp tests/cuda_cpu.h
$(BUILD)/flexgen_cpu.o $(BUILD)/flexgen_cpu_75.o $(BUILD)/cuda_cpu.o:
	@mkdir -p $(@D)
	$(CXX) $(ARCH) -std=c++17 $(CFLAGS) $(ARGS) $(DEVICE_O) -fPIC $(SANITIZE) -Wall -Wextra -Wshadow $(WERROR) -Wno-unknown-pragmas -fno-strict-aliasing -MMD -MP -I. \
	    -isystem $(CUDA_INCLUDE) -include tests/cuda_cpu.h -c $< -o $@
# Faults in kernels, which the suite `emulation` asks it to find.
$(BUILD)/planted: CHECKS :=
$(BUILD)/planted_tsan: CHECKS := -fsanitize=thread -g1
$(BUILD)/planted $(BUILD)/planted_tsan: tests/planted.cu tests/cuda2cpp.sed tests/cuda_cpu.h
	@mkdir -p $(@D)
	(echo '#line 1 "$<"'; sed -E -f tests/cuda2cpp.sed $<) >$@.cpp
	$(CXX) -std=c++17 -O1 $(CHECKS) -Wall -Wextra $(WERROR) -Wno-unknown-pragmas -fno-strict-aliasing -I. -isystem $(CUDA_INCLUDE) \
	    -include tests/cuda_cpu.h $@.cpp $(RUNTIME) -o $@ -rdynamic -lpthread -ldl
ifneq ($(EMULATION),)
$(BUILD)/emulation.log: $(BUILD)/planted $(BUILD)/planted_tsan
$(BUILD)/emulation.log: export PLANTED := $(BUILD)/planted
$(BUILD)/emulation.log: export PLANTED_TSAN := setarch -R $(BUILD)/planted_tsan
endif
# With PLAIN=build only the device is instrumented, and of the rest there is one copy. Its suites need the engine alone, and the sim.
DEVICE := $(patsubst %.c,$(BUILD)/%.o,$(filter-out $(wildcard device/host*.c) device/sim.c device/hardware.c device/pipeline.c,$(wildcard device/*.c)))
ENGINE := $(patsubst %.c,$(PLAIN)/%.o,$(wildcard device/host*.c) admission.c batch.c opt_model.c quant.c schedule.c square.c weights.c plan.c $(wildcard branches/*.c) device/sim.c device/hardware.c \
    base/team.c base/os.c io/checkpoint.c io/file.c io/json.c)
$(BUILD)/emulated/test_%: $(BUILD)/flexgen_cpu.o $(BUILD)/cuda_cpu.o $(DEVICE) $(PLAIN)/tests/test_%.o $(HARNESS) $(ENGINE)
	@mkdir -p $(@D)
	$(CXX) $(SANITIZE) -rdynamic $^ -o $@ $(LIBS) -lcunit
$(BUILD)/random/test_%: $(BUILD)/flexgen_cpu_75.o $(BUILD)/cuda_cpu.o $(DEVICE) $(PLAIN)/tests/test_%.o $(HARNESS) $(ENGINE)
	@mkdir -p $(@D)
	$(CXX) $(SANITIZE) -rdynamic $^ -o $@ $(LIBS) -lcunit

# Four ways, since no single one sees everything. The slower a way, the fewer of the engine's combinations it takes: every so many-th,
# which is prime to the lengths of the lists' inner loops, or these would never turn.
# What is about numbers or queues, not about threads, runs whole in one or two of the ways, and in all of them in `make sanitize`:
# see hurried and a model deeper than the queues in test_schedule.c, every_third in op_cases.h.
#   reverse  blocks and threads that rely on running before others; calls that CUDA refuses, leaks
#   random   the same in another order; copies that arrive later than what needs them; the code for sm_75, and what such a GPU has no
#            room for
#   asan     reads and writes outside of what was allocated, shared memory and regions of a tier included; undefined behaviour
#   tsan     missing barriers, missing waits between streams and with the host
$(BUILD)/reverse/%.log: $(BUILD)/emulated/test_% always
	@scripts/suite.sh $@ CUDA_CPU_ORDER=reverse CUDA_CPU_STRICT=1 $< --every 89
$(BUILD)/random/%.log: $(BUILD)/random/test_% always
	@scripts/suite.sh $@ CUDA_CPU_ORDER=random CUDA_CPU_GBPS=0.05 CUDA_CPU_ARCH=75 $< --every 97
$(BUILD)/emulated/%.log: $(BUILD)/emulated/test_% always
	@scripts/suite.sh $@ $(RUNNER) $< --every $(or $(EVERY),1)

# Frames and checks instead of speed. Address layout randomization confuses TSan.
CHECKED := --no-print-directory SUITE_SECONDS=1800 CFLAGS="-O1 -g1 -fno-omit-frame-pointer $(NATIVE)"
ASAN := $(CHECKED) BUILD=build/asan SANITIZE="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
TSAN := $(CHECKED) BUILD=build/tsan SANITIZE=-fsanitize=thread RUNNER="TSAN_OPTIONS=halt_on_error=1:suppressions=$(abspath tests/tsan.supp) setarch -R"
asan: $(ENGINE) $(HARNESS) $(EMULATED:%=$(BUILD)/tests/test_%.o)
	@$(MAKE) $(ASAN) EVERY=97 PLAIN=$(BUILD) $(EMULATED:%=build/asan/emulated/%.log)
# The host's kernels have little to do there, and take long to optimize.
$(patsubst %,$(BUILD)/device/%.o,host_attend host_linear): CFLAGS += $(HOST_O)
tsan:
	@$(MAKE) $(TSAN) HOST_O=-O0 EVERY=383 $(RACING:%=build/tsan/emulated/%.log)

# ThreadSanitizer looks at the engine on one emulated GPU; at pipelines of them in `make sanitize`.
RACING := $(filter-out $(if $(SUITE),,stages),$(EMULATED))
ORDERED_LOGS := $(foreach way,reverse random,$(EMULATED:%=$(BUILD)/$(way)/%.log))
# The two sanitizers take turns, too; of suites that are asked for by their names both look at the device.
CHECKING := $(if $(SUITE),tsan asan,$(if $(filter %0 %2 %4 %6 %8,$(TEST_TURN)),asan,tsan))
CHECKED_LOGS := $(if $(filter asan,$(CHECKING)),$(EMULATED:%=build/asan/emulated/%.log)) $(if $(filter tsan,$(CHECKING)),$(RACING:%=build/tsan/emulated/%.log))
test: $(if $(EMULATED),$(CHECKING)) $(ORDERED_LOGS) $(LOGS) # the longest begin first
	@scripts/summary.sh $(LOGS) $(ORDERED_LOGS) $(CHECKED_LOGS)
emulated: $(EMULATED:%=$(BUILD)/emulated/%.log)
	@scripts/summary.sh $^
# make sanitize takes all parts, one after the other; make sanitize PART="tsan fuzz" some of them. It ends with the result of each.
PARTS := asan tsan emulated-asan emulated-tsan fuzz
sanitize:
	@for part in $(or $(PART),$(PARTS)); do \
	    if $(MAKE) --no-print-directory sanitize-$$part; then results="$$results sanitize-$$part:passed"; \
	    else results="$$results sanitize-$$part:FAILED"; fi; done; \
	printf '%s\n' $$results | tr : ' '; case $$results in *FAILED*) exit 1 ;; esac
sanitize-asan:
	@$(MAKE) $(ASAN) EMULATED= test
sanitize-tsan:
	@$(MAKE) $(TSAN) EMULATED= SUITE="$(or $(SUITE),schedule lanes pipeline stages world completions)" test
NOT_EMULATED := echo "skipped: no suite here runs on the emulation of a GPU"
sanitize-emulated-asan:
	@$(if $(EMULATED),$(MAKE) $(ASAN) EVERY=11 emulated,$(NOT_EMULATED))
sanitize-emulated-tsan:
	@$(if $(EMULATED),$(MAKE) $(TSAN) EVERY=95 emulated,$(NOT_EMULATED))
sanitize-fuzz:
	@$(MAKE) fuzz N=500000

# Damaged inputs for everything that is read: N of them, which SEED decides.
$(BUILD)/fuzz: $(patsubst %,$(BUILD)/tests/%.o,fuzz fixture written) $(LIB)
	$(CC) $(ALL) $^ -o $@ $(LIBS) -lcunit
fuzz:
	@$(MAKE) $(ASAN) build/asan/fuzz
	@build/asan/fuzz $(or $(N),1000000) $(or $(SEED),1)

.PHONY: test mini-all tape grade exercises gpu-tests asan tsan emulated sanitize $(addprefix sanitize-,$(PARTS)) fuzz
