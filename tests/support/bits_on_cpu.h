// CUDA's functions of one number, in C++: those that take its bits for another type's, and those that round.
#include <cmath>
#include <cstring>

template <class To, class From>
inline To bits_as(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "");
  memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float from_half(unsigned bits) { return bits_as<_Float16>((unsigned short)bits); }

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
