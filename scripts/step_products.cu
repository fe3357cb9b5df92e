// Products of one row of activations with weights in bfloat16, for a decoding step of one request.
//
// Such a product reads every weight once and computes next to nothing, so it takes the time of its
// reads, and what counts is that reads never pause. Therefore each warp asks for a whole segment of
// a weight row at once, and a kernel asks for its first weights before the kernel before it has
// ended: weights depend on nothing. Only then it waits, and reads the activations.

typedef unsigned short bf16;

constexpr int CHUNK = 8;                       // weights in 16 bytes
constexpr int LOADS = SEGMENT / (32 * CHUNK);  // of a lane
constexpr int SEGMENTS = COLUMNS / SEGMENT;    // of a weight row, one warp each
constexpr int WARPS = ROWS * SEGMENTS;
static_assert(SEGMENT % (32 * CHUNK) == 0 && COLUMNS % SEGMENT == 0, "whole loads");
static_assert(!GATED || ROWS % 2 == 0, "rows of the gate and of what it multiplies in pairs");

__device__ float to_float(unsigned bits) { return __uint_as_float(bits << 16); }
__device__ float lower(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ float upper(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ bf16 to_bf16(float value) {  // to nearest, ties to even; values are finite
    const unsigned bits = __float_as_uint(value);
    return static_cast<bf16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

__device__ uint4 read_once(const uint4* source) {
    uint4 out;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
                 : "l"(source));
    return out;
}

__device__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ float sum_of_warp(float value) {
#pragma unroll
    for (int apart = 16; apart; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
    return value;
}

__device__ float squares(unsigned pair) {
    return lower(pair) * lower(pair) + upper(pair) * upper(pair);
}

// output = residual + weight @ input. With NORM the input is an RMSNorm of `input`; with GATED the
// weights are those of two products of `count` rows each, and the output is silu(first) * second.
// A block computes ROWS rows; `count` outputs are a multiple of what a block computes.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 24 / WARPS)
    product(const bf16* weight, const bf16* input, const bf16* norm, const bf16* residual,
            bf16* output, long long count) {
    __shared__ uint4 activations[COLUMNS / CHUNK];
    __shared__ float sums[WARPS], energies[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int segment = warp % SEGMENTS, place = warp / SEGMENTS;
    const long long first = static_cast<long long>(blockIdx.x) * (GATED ? ROWS / 2 : ROWS);
    const long long row = GATED ? first + place / 2 + place % 2 * count : first + place;
    const uint4* source =
        reinterpret_cast<const uint4*>(weight + row * COLUMNS + segment * SEGMENT) + lane;
    uint4 weights[LOADS];
#pragma unroll
    for (int load = 0; load < LOADS; ++load) weights[load] = read_once(source + 32 * load);
    let_next_begin();
    wait_for_previous();

    float energy = 0;
#pragma unroll 2
    for (int chunk = threadIdx.x; chunk < COLUMNS / CHUNK; chunk += 32 * WARPS) {
        uint4 values = reinterpret_cast<const uint4*>(input)[chunk];
        if (NORM) {
            energy += squares(values.x) + squares(values.y) + squares(values.z) + squares(values.w);
            const uint4 scales = reinterpret_cast<const uint4*>(norm)[chunk];
            const auto scaled = [](unsigned value, unsigned scale) {
                return to_bf16(lower(value) * lower(scale)) |
                       static_cast<unsigned>(to_bf16(upper(value) * upper(scale))) << 16;
            };
            values = {scaled(values.x, scales.x), scaled(values.y, scales.y),
                      scaled(values.z, scales.z), scaled(values.w, scales.w)};
        }
        activations[chunk] = values;
    }
    if (NORM) {
        energy = sum_of_warp(energy);
        if (lane == 0) energies[warp] = energy;
    }
    __syncthreads();

    float even = 0, odd = 0;
    const auto add = [&even, &odd](unsigned pair, unsigned other) {
        even += lower(pair) * lower(other);
        odd += upper(pair) * upper(other);
    };
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
        const uint4 values = activations[segment * (SEGMENT / CHUNK) + 32 * load + lane];
        add(weights[load].x, values.x);
        add(weights[load].y, values.y);
        add(weights[load].z, values.z);
        add(weights[load].w, values.w);
    }
    const float sum = sum_of_warp(even + odd);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();

    const int outputs = GATED ? ROWS / 2 : ROWS;
    if (threadIdx.x >= outputs) return;
    const auto total = [](int place) {
        float total = 0;
        for (int segment = 0; segment < SEGMENTS; ++segment)
            total += sums[place * SEGMENTS + segment];
        return total;
    };
    float scale = 1;
    if (NORM) {
        float energy = 0;
        for (int warp = 0; warp < WARPS; ++warp) energy += energies[warp];
        scale = rsqrtf(energy / COLUMNS + EPSILON);
    }
    float result;
    if (GATED) {
        const float gate = scale * total(2 * threadIdx.x);
        result = gate / (1 + __expf(-gate)) * scale * total(2 * threadIdx.x + 1);
    } else {
        result = scale * total(threadIdx.x);
    }
    const long long at = first + threadIdx.x;
    if (residual) result += to_float(residual[at]);
    output[at] = to_bf16(result);
}

// What lies between the first product of a layer and its attention: norms of the heads of queries
// and keys, RoPE, and the new token's place in the cache. A warp handles a head; heads of queries
// come first, then those of keys and of values. `norms` [2, D], `angles` [2, D / 2] float32.
extern "C" __global__ void place_heads(const bf16* rows, const bf16* norms, const float* angles,
                                       bf16* query, bf16* cache, const long long* position,
                                       long long side, long long head_apart, long long token) {
    constexpr int PAIRS = HEAD / 64;  // of a lane: channel i of the first half, and of the second
    const int lane = threadIdx.x % 32;
    const int head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= HEADS + 2 * KV_HEADS) return;
    let_next_begin();
    wait_for_previous();
    float first[PAIRS], second[PAIRS], energy = 0;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        first[pair] = to_float(rows[head * HEAD + 32 * pair + lane]);
        second[pair] = to_float(rows[head * HEAD + HEAD / 2 + 32 * pair + lane]);
        energy += first[pair] * first[pair] + second[pair] * second[pair];
    }
    const bool is_value = head >= HEADS + KV_HEADS, is_query = head < HEADS;
    bf16* target = query + head * HEAD;
    if (!is_query) {
        const int number = (head - HEADS) % KV_HEADS;
        target = cache + is_value * side + number * head_apart + *position * token;
    }
    const float scale = rsqrtf(sum_of_warp(energy) / HEAD + EPSILON);
    const bf16* norm = norms + (is_query ? 0 : HEAD);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        const int channel = 32 * pair + lane;
        float low = first[pair], high = second[pair];
        if (!is_value) {
            low *= scale * to_float(norm[channel]);
            high *= scale * to_float(norm[HEAD / 2 + channel]);
            const float cosine = angles[channel], sine = angles[HEAD / 2 + channel];
            const float turned = low * cosine - high * sine;
            high = high * cosine + low * sine;
            low = turned;
        }
        target[channel] = to_bf16(low);
        target[HEAD / 2 + channel] = to_bf16(high);
    }
}
