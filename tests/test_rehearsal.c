/* test_rehearsal.c: the first minute of scripts/gpu_check.sh on ten machines, which are shell scripts in the place of
 * nvidia-smi, nvcc, uname and ldconfig. On each it goes on, or it ends with one line that says what to do. What its steps
 * do with their time is test_gpu.c's. */
#include "tests.h"

typedef struct {
    const char *name;
    const char *card;   /* name and free MiB, as nvidia-smi says it; NULL: there is no nvidia-smi */
    const char *driver; /* the CUDA version that nvidia-smi prints */
    const char *nvcc;   /* the toolkit's version; NULL: there is no compiler */
    int status;
    const char *says[2];
    bool two_gpus, wsl, no_cublas, no_library; /* no_library: ldconfig does not know libcuda.so.1 */
} Machine;

static const Machine machines[] = {
    {"RTX 3060 that drives a display", "NVIDIA GeForce RTX 3060, 10900", "13.0", "13.0", .says = {"9 GB of the GPU"}},
    {"laptop with 6 GB", "NVIDIA GeForce RTX 3050 6GB Laptop GPU, 5800", "12.8", "12.8", .says = {"5 GB of the GPU"}},
    {"WSL 2", "NVIDIA GeForce RTX 4090, 23000", "13.0", "12.8",
     .says = {"WSL: half of the memory is used", "16 GB of the GPU"}, .wsl = true},
    {"driver that is older than the toolkit", "NVIDIA GeForce RTX 3090, 23000", "12.2", "13.0", 2,
     .says = {"the driver knows CUDA 12.2, and the toolkit is 13.0: install a newer driver", "a toolkit of 12.x"}},
    {"toolkit without cuBLAS", "NVIDIA GeForce RTX 3090, 23000", "13.0", "13.0", 2,
     .says = {"cuBLAS or CUDA's runtime is missing", "apt-get install libcublas-dev-13-0"}, .no_cublas = true},
    {"runtime from Python's packages alone", "NVIDIA GeForce RTX 3090, 23000", "12.8", NULL, 2,
     .says = {"there is no nvcc: install the CUDA toolkit, up to version 12.x"}, .no_cublas = true},
    {"hosted notebook with a T4", "Tesla T4, 14910", "12.4", "12.5", .says = {"13 GB of the GPU"}},
    {"two GPUs", "NVIDIA GeForce RTX 3090, 23000", "13.0", "13.0",
     .says = {"2 GPUs: the first is used; CUDA_VISIBLE_DEVICES=1 takes the second"}, .two_gpus = true},
    {"container without nvidia-smi", NULL, NULL, "13.0", .says = {"no nvidia-smi here"}},
    {"no driver", NULL, NULL, "13.0", 2, .says = {"no driver of NVIDIA's", "--gpus all"}, .no_library = true},
};

TEST(each_machine_goes_on_or_is_told_what_to_do) {
    static const char smi[] =
        "case $* in\n*-L*) i=0; while [ $i -lt %3$d ]; do echo \"GPU $i: one\"; i=$((i + 1)); done ;;\n"
        "*memory.free*) echo '%1$s' | sed 's/.*, //' ;;\n*query*) echo '%1$s, 8.6, 580.1' ;;\n"
        "*) echo '| NVIDIA-SMI 580.1   Driver Version: 580.1   CUDA Version: %2$s  |' ;;\nesac\n";
    /* Elsewhere than in the toolkit, where Debian's own packages put it. */
    const bool system_has_cublas = system("ls /usr/lib/*-linux-gnu/libcublasLt.so.* >/dev/null 2>&1") == 0;
    for (size_t i = 0; i < sizeof machines / sizeof *machines; i++) {
        const Machine *m = &machines[i];
        char command[1500];
        if (m->no_cublas && m->nvcc && system_has_cublas) continue;
        /* Its programs are shell scripts, or are not found. */
        const struct {
            const char *name, *format, *a, *b;
        } programs[] = {
            {"nvidia-smi", smi, m->card, m->driver},
            {"nvcc", "echo 'Cuda compilation tools, release %1$s, V%1$s.88'\n", m->nvcc, ""},
            {"uname", "[ \"$1\" = -r ] && echo %1$s\n", m->wsl ? "6.6.87.2-microsoft-standard-WSL2" : "6.1.0", ""},
            {"ldconfig", "echo '%1$s'\n", m->no_library ? "" : "libcuda.so.1 (libc6,x86-64) => /usr/lib/libcuda.so.1", ""},
            {"python3", "", NULL, ""}};
        const char *dir = temp_dir();
        for (int p = 0; p < 5; p++) {
            char body[900] = "exit 127\n", text[1000];
            if (programs[p].a)
                snprintf(body, sizeof body, programs[p].format, programs[p].a, programs[p].b, 1 + m->two_gpus);
            const int len = snprintf(text, sizeof text, "#!/bin/sh\n%s", body);
            write_file(dir, programs[p].name, text, len);
            CHECK(chmod(in_dir(dir, programs[p].name), 0755) == 0);
        }
        snprintf(command, sizeof command,
                 "cd %1$s && mkdir home include lib64 && cp -r $OLDPWD/scripts home && { %2$s || touch "
                 "include/cublasLt.h lib64/libcublasLt.so.13 lib64/libcudart_static.a; } && cd home && "
                 "env -u CUDA_VISIBLE_DEVICES -u GPU_MEM_GB "
                 "PATH=%1$s:$PATH CUDA_HOME=%1$s TMPDIR=%1$s scripts/gpu_check.sh correctness %1$s/a.tar.gz 20 card "
                 ">%1$s/said 2>&1; rc=$?; cat correctness/*card.log >>%1$s/said 2>/dev/null; "
                 "tar xzOf %1$s/a.tar.gz >>%1$s/said 2>/dev/null; exit $rc",
                 dir, m->no_cublas ? "true" : "false");
        const int status = system(command);
        char *said = contents(in_dir(dir, "said"), NULL);
        bool right = WIFEXITED(status) && WEXITSTATUS(status) == m->status;
        for (int s = 0; s < 2 && m->says[s]; s++) right = right && strstr(said, m->says[s]);
        if (m->status) right = right && strchr(said, '\n') == said + strlen(said) - 1; /* one line */
        if (!right) fprintf(stderr, "\n    %s: status %d\n%s\n", m->name, WEXITSTATUS(status), said);
        CU_ASSERT(right);
        free(said);
    }
}
