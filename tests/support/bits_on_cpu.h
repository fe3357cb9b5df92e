// CUDA's functions that take the bits of one type for another, in C++.
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
