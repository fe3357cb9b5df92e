// What a CUDA kernel in which threads exchange nothing needs to run on a CPU, one thread after another.
#include <cmath>
#include <cstring>

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


// Compiled with -ffp-contract=off, so that nothing is fused but what says so.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rd(float a, float b) { return std::floor(a) + b; }  // where b is 2^23

// In place of the functions of int2.cu that are written in PTX.
inline unsigned to_half(float x) { return bits_as<unsigned short>((_Float16)x); }
inline float min_nan(float a, float b) { return a != a || b != b ? NAN : fminf(a, b); }
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : fmaxf(a, b); }

// Declared only: for the parts of int2.cu and feedback.cu that are compiled but not called.
float __shfl_sync(unsigned, float, int);
void __syncthreads();
unsigned __shfl_xor_sync(unsigned, unsigned, int);
float __shfl_xor_sync(unsigned, float, int);
bool __all_sync(unsigned, bool);
unsigned __byte_perm(unsigned, unsigned, unsigned);
void __syncwarp();
