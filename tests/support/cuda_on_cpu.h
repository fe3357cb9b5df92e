// What a CUDA kernel in which threads exchange nothing needs to run on a CPU, one thread after another.
#include "bits_on_cpu.h"
#define __device__ inline
#define __global__ inline
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)

struct Index { unsigned x, y; };
static Index threadIdx, blockIdx;
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }


// Declared only: for the parts of int2.cu and feedback.cu that are compiled but not called.
float __shfl_sync(unsigned, float, int);
void __syncthreads();
unsigned __shfl_xor_sync(unsigned, unsigned, int);
float __shfl_xor_sync(unsigned, float, int);
bool __all_sync(unsigned, bool);
unsigned __byte_perm(unsigned, unsigned, unsigned);
void __syncwarp();
