# Rewrites, for cuda_cpu.h, the three constructs of CUDA that C++ cannot express. Lines keep their numbers.
# A launch must stand on one line, from the kernel's name to the parenthesis after >>>.
# kernel<N><<<grid, block, shared, stream>>>(args)  ->  cuda_cpu::launch(kernel<N>, grid, ...)(args)
s/([A-Za-z_][A-Za-z_0-9]*)(<[^<>;]*>)? *<<<(.*)>>> *\(/cuda_cpu::launch(\1\2, \3)(/
# extern __shared__ float s[];  ->  float *s = (float *)cuda_cpu::dynamic_shared();
s/extern __shared__ ([A-Za-z_0-9 ]+) ([A-Za-z_0-9]+)\[\];/\1 *\2 = (\1 *)cuda_cpu::dynamic_shared();/
# __shared__ float s[4];  ->  __shared__ float s[4]; cuda_cpu::fresh(&s, sizeof s);
s/^( *)__shared__ ([^;]*[ *])([A-Za-z_0-9]+)((\[[^;]*\])?);/\1__shared__ \2\3\4; cuda_cpu::fresh(\&\3, sizeof \3);/
