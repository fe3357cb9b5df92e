// What kernels share that read or write rows of segments, as `SegmentLayout` in rotationzoo/codec/transform.py defines them.

constexpr unsigned EACH_BYTE = 0x01010101u;

// The first word of a row with the number of its scale: a bit in each byte.
__device__ unsigned spread(unsigned number) { return number * 0x00204081u & EACH_BYTE; }
__device__ unsigned gathered(unsigned word) { return (word & EACH_BYTE) * 0x10204080u >> 28; }
