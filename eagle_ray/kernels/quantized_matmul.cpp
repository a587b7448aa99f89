// Products with weights of 4 and 8 bits on a CPU: out = inputs @ weight.T + bias, in fp32 and bf16.
//
// cpu_ops.py loads this file's library and says what the function computes. The weight of output o and input i is
// scale[o][g] * code[o][i] + offset[o][g], where g is the group of i. Inputs are rounded to 8 bits: in each block of
// BLOCK of a row, input i is about step * rounded[i].
//
// An output is summed in one order, whatever the processor and the other rows:
//
//     for each group, for each block (or half a block, if groups are smaller) of the group:
//         partial = fma(step, sum of code * rounded, partial)         the inner sum is of integers: it has no order
//     total = fma(partial, scale, total)
//     total = fma(sum of the group's inputs, offset, total)
//
// Codes lie in tiles of TILE outputs. In a tile, a block takes 8 (4 bits: 4) vectors of 64 bytes; a vector holds 4
// successive inputs of each output. With 4 bits, the low halves of vector j are inputs 4j .. 4j + 3 and the high halves
// are inputs 4j + 16 .. 4j + 19.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_ops.h"

#if defined(__x86_64__) && defined(__AVX2__)
#include <immintrin.h>
#define X86 1
#endif

namespace {

enum Path : int32_t { PORTABLE, AVX2, AVX512_VNNI };

constexpr int64_t TILE = 16, BLOCK = 32;
constexpr int64_t PANEL = 128;   // rows whose rounded inputs stay in a cache
constexpr int64_t AHEAD = 2048;  // bytes of codes that are fetched before they are read
// Multiplications below which starting threads costs more than they save: of threads that sleep, and of those that spin
// since another product of the same call.
constexpr int64_t SMALL = 1 << 21, SMALL_AWAKE = 1 << 18;

inline float number(float x) { return x; }
inline float number(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline int32_t magnitude_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffff;
}
inline float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline void set(float &to, float x) { to = x; }
inline void set(bf16 &to, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to.bits = x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : (bits >> 16) | 0x40;
}

// The rounded inputs of some rows: int8 numbers, the step of each block, and each group's sum of step * rounded. Rows lie
// together in each block, so that a kernel finds all of its rows at fixed distances.
struct Inputs {
    std::vector<int8_t> numbers;         // [blocks, rows, BLOCK]
    std::vector<float> steps, sums;      // [blocks, rows] and [groups, rows]
    int64_t rows, blocks, groups, part;  // part: inputs of a group or of a block, whichever is smaller

    void resize(int64_t count, const Weight &w) {
        rows = count;
        blocks = w.inputs / BLOCK, groups = w.inputs / w.group, part = std::min(w.group, BLOCK);
        numbers.resize(blocks * rows * BLOCK);
        steps.resize(blocks * rows);
        sums.resize(groups * rows);
    }

    const int8_t *block(int64_t b, int64_t row) const { return numbers.data() + (b * rows + row) * BLOCK; }
    const float *steps_of(int64_t b, int64_t row) const { return steps.data() + b * rows + row; }
    const float *sums_of(int64_t g, int64_t row) const { return sums.data() + g * rows + row; }

    template <typename T> void round(const T *from, int64_t row) {
        int64_t group = blocks * BLOCK / groups;
        for (int64_t g = 0; g < groups; g++)
            sums[g * rows + row] = 0.0f;
        for (int64_t b = 0; b < blocks; b++) {
            float values[BLOCK];
            for (int i = 0; i < BLOCK; i++)
                values[i] = number(from[b * BLOCK + i]);
            int32_t most = 0;  // the bits of the largest magnitude: they are in the order of the numbers
            for (int i = 0; i < BLOCK; i++)
                most = std::max(most, magnitude_bits(values[i]));
            float largest = float_of(most);
            bool is_finite = most < 0x7f800000;
            float step = is_finite ? largest / 127.0f : NAN;
            float inverse = is_finite && most > 0 ? 127.0f / largest : 0.0f;
            int32_t rounded[BLOCK];
            for (int i = 0; i < BLOCK; i++)
                rounded[i] = (int32_t)__builtin_rintf(is_finite ? values[i] * inverse : 0.0f);
            steps[b * rows + row] = step;
            int8_t *to = numbers.data() + (b * rows + row) * BLOCK;
            for (int i = 0; i < BLOCK; i++)
                to[i] = (int8_t)rounded[i];
            for (int64_t i = 0; i < BLOCK; i += part) {
                int32_t total = 0;
                for (int64_t j = i; j < i + part; j++)
                    total += rounded[j];
                float &at = sums[(b * BLOCK + i) / group * rows + row];
                at = __builtin_fmaf(step, (float)total, at);
            }
        }
    }
};

inline float half_number(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
}

// The TILE scales of a group, or with `offset` its TILE offsets.
inline float scale_of(const Weight &w, int64_t tile, int64_t group, int64_t lane, bool offset) {
    int64_t at = ((tile * (w.inputs / w.group) + group) * 2 + offset) * TILE + lane;
    return w.half_scales ? half_number(((const uint16_t *)w.scales)[at]) : ((const float *)w.scales)[at];
}

inline int32_t code_of(const Weight &w, const uint8_t *block, int64_t i, int64_t lane) {
    if (w.bits == 8)
        return block[i / 4 * 64 + lane * 4 + i % 4];
    uint8_t pair = block[i / 4 % 4 * 64 + lane * 4 + i % 4];
    return i < BLOCK / 2 ? pair & 15 : pair >> 4;
}

// The rows [row, row + count) of a tile's outputs: totals[r * TILE + lane].
void portable(const Weight &w, const Inputs &in, int64_t tile, int64_t row, int count, float *totals) {
    int64_t block_bytes = BLOCK * TILE * w.bits / 8;
    const uint8_t *codes = w.codes + tile * in.blocks * block_bytes;
    for (int r = 0; r < count; r++)
        for (int64_t lane = 0; lane < TILE; lane++) {
            float total = 0.0f;
            for (int64_t g = 0; g < in.groups; g++) {
                float partial = 0.0f;
                for (int64_t first = g * w.group; first < (g + 1) * w.group; first += in.part) {
                    int32_t whole = 0;
                    for (int64_t i = first; i < first + in.part; i++)
                        whole += code_of(w, codes + i / BLOCK * block_bytes, i % BLOCK, lane) *
                                 in.block(i / BLOCK, row + r)[i % BLOCK];
                    partial = __builtin_fmaf((float)whole, *in.steps_of(first / BLOCK, row + r), partial);
                }
                total = __builtin_fmaf(partial, scale_of(w, tile, g, lane, false), total);
                total = __builtin_fmaf(*in.sums_of(g, row + r), scale_of(w, tile, g, lane, true), total);
            }
            totals[r * TILE + lane] = total;
        }
}

#if X86

inline int32_t word(const int8_t *from) {
    int32_t four;
    memcpy(&four, from, 4);
    return four;
}

// `half` of a tile: 8 outputs of COUNT rows. PARTS: groups of a block; 0 if a group has several blocks.
template <int COUNT, int BITS, int PARTS>
void avx2_half(const Weight &w, const Inputs &in, int64_t tile, int64_t row, int half, float *totals) {
    constexpr int64_t BYTES = BLOCK * TILE * BITS / 8;
    constexpr int NUM_PARTS = PARTS ? PARTS : 1, STEPS = 8 / NUM_PARTS;
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const uint8_t *codes = w.codes + tile * in.blocks * BYTES + half * 32;
    int64_t per_group = PARTS ? 1 : w.group / BLOCK, at = tile * in.groups * 2 * TILE + half * 8;
    __m256 total[COUNT];
    for (int r = 0; r < COUNT; r++)
        total[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < in.groups; g++, at += 2 * TILE) {
        __m256 partial[COUNT];
        for (int r = 0; r < COUNT; r++)
            partial[r] = _mm256_setzero_ps();
        int64_t first = g / NUM_PARTS * per_group, begin = g % NUM_PARTS * STEPS;
        for (int64_t b = first; b < first + per_group; b++) {
            const int8_t *numbers = in.block(b, row);
            const float *steps = in.steps_of(b, row);
            __m256i whole[COUNT];
            for (int r = 0; r < COUNT; r++)
                whole[r] = _mm256_setzero_si256();
            for (int64_t j = begin; j < begin + STEPS; j++) {
                const uint8_t *from = codes + b * BYTES + (BITS == 8 ? j : j % 4) * 64;
                __m256i code = _mm256_loadu_si256((const __m256i *)from);
                if (BITS == 4)
                    code = _mm256_and_si256(j < 4 ? code : _mm256_srli_epi16(code, 4), low);
                for (int r = 0; r < COUNT; r++) {
                    __m256i input = _mm256_set1_epi32(word(numbers + r * BLOCK + 4 * j));
                    if (BITS == 4)  // the sums of two products take 12 bits, and those of a block 15
                        whole[r] = _mm256_add_epi16(whole[r], _mm256_maddubs_epi16(code, input));
                    else {  // with a sign, code - 128 and an input fit: pairs take 16 bits. 128 inputs are added again
                        __m256i centred = _mm256_xor_si256(code, _mm256_set1_epi8((char)0x80));
                        __m256i pair = _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(input, centred));
                        __m256i inputs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), input);
                        __m256i back = _mm256_slli_epi32(_mm256_madd_epi16(inputs, ones), 7);
                        whole[r] = _mm256_add_epi32(whole[r], _mm256_add_epi32(_mm256_madd_epi16(pair, ones), back));
                    }
                }
            }
            for (int r = 0; r < COUNT; r++) {
                __m256i sum = BITS == 4 ? _mm256_madd_epi16(whole[r], ones) : whole[r];
                __m256 step = _mm256_set1_ps(steps[r]);
                partial[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), step, partial[r]);
            }
        }
        __m256 scale, offset;
        if (w.half_scales) {
            const uint16_t *scales = (const uint16_t *)w.scales + at;
            scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)scales));
            offset = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + TILE)));
        } else {
            scale = _mm256_loadu_ps((const float *)w.scales + at);
            offset = _mm256_loadu_ps((const float *)w.scales + at + TILE);
        }
        for (int r = 0; r < COUNT; r++) {
            total[r] = _mm256_fmadd_ps(partial[r], scale, total[r]);
            total[r] = _mm256_fmadd_ps(_mm256_set1_ps(in.sums_of(g, row)[r]), offset, total[r]);
        }
    }
    for (int r = 0; r < COUNT; r++)
        _mm256_storeu_ps(totals + r * TILE + half * 8, total[r]);
}

template <int BITS, int PARTS>
void avx2(const Weight &w, const Inputs &in, int64_t tile, int64_t row, int count, float *totals) {
    for (int half = 0; half < 2; half++) {
        int r = 0;
        for (; r + 4 <= count; r += 4)
            avx2_half<4, BITS, PARTS>(w, in, tile, row + r, half, totals + r * TILE);
        for (; r < count; r++)
            avx2_half<1, BITS, PARTS>(w, in, tile, row + r, half, totals + r * TILE);
    }
}
#endif

#if defined(__AVX512F__)
#define FOR_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

inline void load_scales(const Weight &w, int64_t at, __m512 &scale, __m512 &offset) {
    if (w.half_scales) {
        const uint16_t *scales = (const uint16_t *)w.scales + at;
        scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)scales));
        offset = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(scales + TILE)));
    } else {
        scale = _mm512_loadu_ps((const float *)w.scales + at);
        offset = _mm512_loadu_ps((const float *)w.scales + at + TILE);
    }
}

// A tile's outputs of COUNT rows. PARTS: groups of a block; 0 if a group has several blocks.
template <int COUNT, int BITS, int PARTS>
FOR_VNNI void vnni_rows(const Weight &w, const Inputs &in, int64_t tile, int64_t row, float *totals) {
    constexpr int64_t BYTES = BLOCK * TILE * BITS / 8;
    constexpr int NUM_PARTS = PARTS ? PARTS : 1, STEPS = 8 / NUM_PARTS;
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t *codes = w.codes + tile * in.blocks * BYTES;
    int64_t per_group = PARTS ? 1 : w.group / BLOCK, at = tile * in.groups * 2 * TILE;
    __m512 total[COUNT], partial[COUNT];
    for (int r = 0; r < COUNT; r++)
        total[r] = _mm512_setzero_ps();
    for (int64_t b = 0, g = 0; b < in.blocks; b += per_group) {
        for (int part = 0; part < NUM_PARTS; part++, g++, at += 2 * TILE) {
            for (int r = 0; r < COUNT; r++)
                partial[r] = _mm512_setzero_ps();
            for (int64_t c = b; c < b + per_group; c++) {
                const int8_t *numbers = in.block(c, row);
                const float *steps = in.steps_of(c, row);
                __m512i code[STEPS];
#pragma GCC unroll 8
                for (int j = 0; j < STEPS; j++) {
                    int step = part * STEPS + j;
                    code[j] = _mm512_loadu_si512(codes + c * BYTES + (BITS == 8 ? step : step % 4) * 64);
                    if (BITS == 8 || step < 4)
                        _mm_prefetch(codes + c * BYTES + AHEAD + step * 64, _MM_HINT_T0);
                    if (BITS == 4)
                        code[j] = _mm512_and_si512(step < 4 ? code[j] : _mm512_srli_epi16(code[j], 4), low);
                }
#pragma GCC unroll 8
                for (int r = 0; r < COUNT; r++) {
                    const int8_t *input = numbers + r * BLOCK + part * 4 * STEPS;
                    __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();
#pragma GCC unroll 4
                    for (int j = 0; j < STEPS; j += 2) {
                        even = _mm512_dpbusd_epi32(even, code[j], _mm512_set1_epi32(word(input + 4 * j)));
                        odd = _mm512_dpbusd_epi32(odd, code[j + 1], _mm512_set1_epi32(word(input + 4 * j + 4)));
                    }
                    __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd));
                    __m512 step = _mm512_set1_ps(steps[r]);
                    partial[r] = PARTS ? _mm512_mul_ps(sum, step) : _mm512_fmadd_ps(sum, step, partial[r]);
                }
            }
            __m512 scale, offset;
            load_scales(w, at, scale, offset);
#pragma GCC unroll 8
            for (int r = 0; r < COUNT; r++) {
                total[r] = _mm512_fmadd_ps(partial[r], scale, total[r]);
                total[r] = _mm512_fmadd_ps(_mm512_set1_ps(in.sums_of(g, row)[r]), offset, total[r]);
            }
        }
    }
    for (int r = 0; r < COUNT; r++)
        _mm512_storeu_ps(totals + r * TILE, total[r]);
}

// Up to 8 rows read the codes once, however many they are.
template <int BITS, int PARTS>
void vnni(const Weight &w, const Inputs &in, int64_t tile, int64_t row, int count, float *totals) {
    for (int r = 0; r < count; r += 8) {
        float *to = totals + r * TILE;
        switch (std::min(count - r, 8)) {
#define ROWS(N)                                                                                                        \
    case N:                                                                                                            \
        vnni_rows<N, BITS, PARTS>(w, in, tile, row + r, to);                                                           \
        break;
            ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8)
#undef ROWS
        }
    }
}
#endif

using TileFunction = void (*)(const Weight &, const Inputs &, int64_t tile, int64_t row, int count, float *totals);

template <template <int, int> class Choice> TileFunction chosen(const Weight &w) {
    if (w.group > BLOCK)
        return w.bits == 4 ? Choice<4, 0>::run : Choice<8, 0>::run;
    if (w.group == BLOCK)
        return w.bits == 4 ? Choice<4, 1>::run : Choice<8, 1>::run;
    return w.bits == 4 ? Choice<4, 2>::run : Choice<8, 2>::run;
}

#if X86
template <int BITS, int PARTS> struct Avx2 {
    static constexpr TileFunction run = avx2<BITS, PARTS>;
};
#endif
#if defined(__AVX512F__)
template <int BITS, int PARTS> struct Vnni {
    static constexpr TileFunction run = vnni<BITS, PARTS>;
};
#endif

TileFunction function_of(const Weight &w) {
#if defined(__AVX512F__)
    if (w.path >= AVX512_VNNI)
        return chosen<Vnni>(w);
#endif
#if X86
    if (w.path >= AVX2)
        return chosen<Avx2>(w);
#endif
    return portable;
}

// Stores two tiles' outputs from `begin` on. Together they fill a cache line or two of each row, which lie pages apart.
template <typename T>
void store(T *out, const T *bias, const Weight &w, int64_t begin, int64_t count, const float (*totals)[PANEL * TILE]) {
    int64_t lanes = std::min(2 * TILE, w.outputs - begin);
    float add[2 * TILE] = {};
    for (int64_t lane = 0; bias && lane < lanes; lane++)
        add[lane] = number(bias[begin + lane]);
    for (int64_t r = 0; r < count; r++) {
        T row[2 * TILE];
        for (int64_t lane = 0; lane < TILE; lane++)
            set(row[lane], totals[0][r * TILE + lane] + add[lane]);
        for (int64_t lane = 0; lane < TILE && lanes > TILE; lane++)
            set(row[TILE + lane], totals[1][r * TILE + lane] + add[TILE + lane]);
        memcpy(out + r * w.outputs + begin, row, lanes * sizeof(T));
    }
}

template <typename T>
void multiply(T *out, const T *inputs, const T *bias, const Weight &w, int64_t rows, int threads, int64_t small) {
    thread_local Inputs in;
    TileFunction run = function_of(w);
    int64_t tiles = (w.outputs + TILE - 1) / TILE;
    for (int64_t first = 0; first < rows; first += PANEL) {
        int64_t count = std::min(PANEL, rows - first);
        in.resize(count, w);
        Inputs &rounded = in;  // the caller's, not one of each thread
#pragma omp parallel num_threads(threads) if (threads > 1 && count * w.inputs * w.outputs > small)
        {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < count; r++)
                rounded.round(inputs + (first + r) * w.inputs, r);
#pragma omp for schedule(static) nowait
            for (int64_t tile = 0; tile < tiles; tile += 2) {
                float totals[2][PANEL * TILE];
                for (int64_t i = 0; i < std::min<int64_t>(2, tiles - tile); i++)
                    run(w, rounded, tile + i, 0, count, totals[i]);
                store(out + first * w.outputs, bias, w, tile * TILE, count, totals);
            }
        }
    }
}

}  // namespace

// The best of Path that this processor and this library have. AMX was tried: beside the scales of blocks, its products
// gain nothing over VNNI.
extern "C" int quantized_matmul_path() {
#if defined(__AVX512F__)
    if (__builtin_cpu_supports("avx512vnni"))
        return AVX512_VNNI;
#endif
#if X86
    return AVX2;
#endif
    return PORTABLE;
}

extern "C" void quantized_matmul_float32(float *out, const float *inputs, const float *bias, const Weight *weight,
                                         int64_t rows, int32_t threads) {
    multiply(out, inputs, bias, *weight, rows, threads, SMALL);
}

extern "C" void quantized_matmul_awake(float *out, const float *inputs, const float *bias, const Weight *weight,
                                       int64_t rows, int32_t threads) {
    multiply(out, inputs, bias, *weight, rows, threads, SMALL_AWAKE);
}

extern "C" void quantized_matmul_bfloat16(bf16 *out, const bf16 *inputs, const bf16 *bias, const Weight *weight,
                                          int64_t rows, int32_t threads) {
    multiply(out, inputs, bias, *weight, rows, threads, SMALL);
}
