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
#include <optional>
#include <vector>

#include "cpu_ops.h"
#include "parallel.h"
#include "quantized_matmul.h"
#include "quantized_tiles.h"

// Whether compiler and assembler know the dot products of 2021's processors.
#if !defined(__clang__) && __GNUC__ >= 11
#define KNOWS_DOTS 1
#endif
#if defined(__x86_64__) && defined(__AVX2__)
#include "tiles_avx2.h"
#define X86 1
#if KNOWS_DOTS && !defined(__AVX512F__)
#define HAS_AVX_VNNI 1
#endif
#endif
#if defined(__AVX512F__)
#include "tiles_vnni.h"
#if defined(__linux__) && KNOWS_DOTS
#include "tiles_amx.h"
#define HAS_AMX 1
#endif
#endif
#if defined(__aarch64__)
#include "tiles_neon.h"
#endif

namespace {

enum Path : int32_t { PORTABLE, AVX2, AVX_VNNI, AVX512_VNNI, AMX, NEON, NEON_I8MM };

constexpr int64_t PANEL = 128;    // rows whose rounded inputs stay in a cache
constexpr int64_t FEW = 1 << 18;  // multiplications below which waking the team costs more than it saves

#if defined(__aarch64__)
using Half = __fp16;  // GCC has _Float16 there from version 13 on
#else
using Half = _Float16;
#endif

inline float half_number(uint16_t bits) {
    Half value;
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
void portable(const Weight &w, const RoundedRows &in, int64_t tile, int64_t row, int count, float *totals) {
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

template <template <int, int> class Choice> TileFunction chosen(const Weight &w) {
    if (w.group > BLOCK)
        return w.bits == 4 ? Choice<4, 0>::run : Choice<8, 0>::run;
    if (w.group == BLOCK)
        return w.bits == 4 ? Choice<4, 1>::run : Choice<8, 1>::run;
    return w.bits == 4 ? Choice<4, 2>::run : Choice<8, 2>::run;
}

#if X86
template <int BITS, int PARTS> struct Avx2 {
    static constexpr TileFunction run = avx2<BITS, PARTS, false>;
};
#endif
#if HAS_AVX_VNNI
template <int BITS, int PARTS> struct AvxVnni {
    static constexpr TileFunction run = avx2<BITS, PARTS, true>;
};
#endif
#if defined(__AVX512F__)
template <int BITS, int PARTS> struct Vnni {
    static constexpr TileFunction run = vnni<BITS, PARTS>;
};
#endif

#if HAS_AMX
template <int BITS, int PARTS> struct Amx {
    static constexpr TileFunction run = amx<BITS, PARTS>;
};
#endif

#if defined(__aarch64__)
template <int BITS, int PARTS> struct Neon {
    static constexpr TileFunction run = neon<BITS, PARTS>;
};
template <int BITS, int PARTS> struct NeonI8mm {
    static constexpr TileFunction run = neon_i8mm<BITS, PARTS>;
};
#endif

TileFunction function_of(const Weight &w) {
#if defined(__aarch64__)
    if (w.path == NEON_I8MM)
        return chosen<NeonI8mm>(w);
    if (w.path == NEON)
        return chosen<Neon>(w);
#endif
#if HAS_AMX
    if (w.path == AMX)
        return chosen<Amx>(w);
#endif
#if defined(__AVX512F__)
    if (w.path >= AVX512_VNNI)
        return chosen<Vnni>(w);
#endif
#if HAS_AVX_VNNI
    if (w.path >= AVX_VNNI)
        return chosen<AvxVnni>(w);
#endif
#if X86
    if (w.path >= AVX2)
        return chosen<Avx2>(w);
#endif
    return portable;
}

// Stores up to TILE outputs of a row. adds: to what is there.
template <typename T> void store_row(T *out, bool adds, const float *totals, const float *bias, int64_t lanes) {
    for (int64_t i = 0; i < lanes; i += LANES) {
        Floats value = rounded(load(totals + i) + load(bias + i), out);
        if (adds)
            value = load_upto(out + i, lanes - i) + value;
        store_upto(out + i, value, lanes - i);
    }
}

// Products that are written to rows of outputs.
template <typename T> struct Output {
    T *out;
    bool adds;
    int64_t outputs;

    void operator()(int64_t row, int64_t begin, int64_t lanes, const float (*totals)[PANEL * TILE], int64_t r,
                    const float *bias) const {
        T *to = out + row * outputs + begin;
        store_row(to, adds, totals[0] + r * TILE, bias, std::min(lanes, TILE));
        if (lanes > TILE)
            store_row(to + TILE, adds, totals[1] + r * TILE, bias + TILE, lanes - TILE);
    }
};

// The highest of the outputs of a row so far, the first of several; a NaN is the highest, as for torch.
struct Best {
    float value = -INFINITY;
    int64_t index = 0;
    bool is_nan = false;

    // Outputs come in rising order of their indices.
    void see(float x, int64_t at) {
        bool is_first_nan = x != x && !is_nan;
        if (is_first_nan || (!is_nan && x > value))
            *this = {x, at, is_first_nan};
    }
};

// Products of which only each row's highest is kept. Every member has rows of its own.
struct Highest {
    Best *best;

    void operator()(int64_t row, int64_t begin, int64_t lanes, const float (*totals)[PANEL * TILE], int64_t r,
                    const float *bias) const {
        for (int64_t first = 0; first < lanes; first += TILE) {
            float values[TILE];
            bool is_higher = false;
            for (int64_t i = 0; i < TILE; i++) {
                values[i] = totals[first / TILE][r * TILE + i] + bias[first + i];
                is_higher |= !(values[i] <= best[row].value);
            }
            for (int64_t i = 0; is_higher && i < std::min(lanes - first, TILE); i++)
                best[row].see(values[i], begin + first + i);
        }
    }
};

// Computes the member's share of the outputs of all rows, in rising order of each row's, and passes one or two tiles of a
// row at a time to `take`: together they fill a cache line or two of each row of outputs, which lie pages apart.
template <typename T, typename Take>
void multiply(const team::Member &member, const Take &take, const T *all_bias, const Weight &w, const RoundedRows &in,
              int64_t rows) {
    TileFunction run = function_of(w);
#if HAS_AMX
    std::optional<TileRegisters> registers;
    if (w.path == AMX && rows >= MIN_AMX_ROWS)
        registers.emplace(in.part);
#endif
    int64_t tiles = (w.outputs + TILE - 1) / TILE;
    int64_t wide = tiles >= 4 * member.count ? 2 : 1;  // tiles that are passed together
    team::Span mine = member.share((tiles + wide - 1) / wide);
    for (int64_t first = 0; first < rows; first += PANEL) {
        int64_t count = std::min(PANEL, rows - first);
        for (int64_t i : mine) {
            float totals[2][PANEL * TILE], bias[2 * TILE] = {};
            int64_t begin = i * wide, end = std::min(begin + wide, tiles);
            for (int64_t tile = begin; tile < end; tile++)
                run(w, in, tile, first, count, totals[tile - begin]);
            int64_t lanes = std::min(end * TILE, w.outputs) - begin * TILE;
            for (int64_t j = 0; all_bias && j < lanes; j += LANES)
                store(bias + j, load_upto(all_bias + begin * TILE + j, lanes - j));
            for (int64_t r = 0; r < count; r++)
                take(first + r, begin * TILE, lanes, totals, r, bias);
        }
    }
}

template <typename T>
void round_and_multiply(T *out, const T *inputs, const T *bias, const Weight &w, int64_t rows, int threads) {
    thread_local RowBuffer buffer;
    buffer.reserve(rows, w.inputs);
    const RoundedRows rounded = buffer.rows_of(w);
    parallel(rows * w.inputs * w.outputs > FEW ? threads : 1, [&](const team::Member &member) {
        round_rows(member, inputs, rows, rounded);
        member.barrier();
        multiply(member, Output<T>{out, false, w.outputs}, bias, w, rounded, rows);
    });
}

// Finds the highest output of each row among those that the members found.
void pick_highest(int64_t *picks, const std::vector<Best> &found, int64_t members, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        Best best;
        for (int64_t i = 0; i < members; i++)
            best.see(found[i * rows + r].value, found[i * rows + r].index);
        picks[r] = best.index;
    }
}

}  // namespace

void multiply_share(const team::Member &member, float *out, bool adds, const Projection &projection,
                    const RoundedRows &inputs, int64_t rows) {
    const Weight &w = *projection.weight;
    multiply(member, Output<float>{out, adds, w.outputs}, projection.bias, w, inputs, rows);
}

// The best of Path that this processor and this library have.
extern "C" int quantized_matmul_path() {
#if HAS_AMX
    if (has_amx())
        return AMX;
#endif
#if defined(__AVX512F__)
    if (__builtin_cpu_supports("avx512vnni"))
        return AVX512_VNNI;
#endif
#if HAS_AVX_VNNI
    if (__builtin_cpu_supports("avxvnni"))
        return AVX_VNNI;
#endif
#if X86
    return AVX2;
#endif
#if defined(__aarch64__)
    if (has_dot_products())
        return has_i8mm() ? NEON_I8MM : NEON;
#endif
    return PORTABLE;
}

extern "C" void quantized_matmul_float32(float *out, const float *inputs, const float *bias, const Weight *weight,
                                         int64_t rows, int32_t threads) {
    round_and_multiply(out, inputs, bias, *weight, rows, threads);
}

extern "C" void quantized_matmul_bfloat16(bf16 *out, const bf16 *inputs, const bf16 *bias, const Weight *weight,
                                          int64_t rows, int32_t threads) {
    round_and_multiply(out, inputs, bias, *weight, rows, threads);
}

// The index of the highest output of each row: what argmax finds in the rows that quantized_matmul writes.
extern "C" void quantized_argmax_float32(int64_t *picks, const float *inputs, const float *bias, const Weight *weight,
                                         int64_t rows, int32_t threads) {
    thread_local RowBuffer buffer;
    thread_local std::vector<Best> of_thread;
    const Weight &w = *weight;
    buffer.reserve(rows, w.inputs);
    const RoundedRows rounded = buffer.rows_of(w);
    std::vector<Best> &found = of_thread;  // the caller's, not one of each member
    int64_t members = 1;
    found.assign(threads * rows, Best{});
    parallel(rows * w.inputs * w.outputs > FEW ? threads : 1, [&](const team::Member &member) {
        round_rows(member, inputs, rows, rounded);
        member.barrier();
        multiply(member, Highest{found.data() + member.index * rows}, bias, w, rounded, rows);
        if (member.index == 0)
            members = member.count;
    });
    pick_highest(picks, found, members, rows);
}
