// Products of a tile by ARM's dot products (Armv8.2's sdot: Graviton 2 and newer, Apple silicon) and by its products of
// 2 x 8 and 8 x 2 numbers (i8mm's smmla: Graviton 3 and newer, Apple's M2 and newer), which need two rows: see
// quantized_matmul.cpp, which says in what order an output is summed.

#pragma once

#include <arm_neon.h>

#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "quantized_tiles.h"

namespace {

#define FOR_DOT __attribute__((target("arch=armv8.2-a+dotprod")))
#define FOR_I8MM __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))

inline bool has_dot_products() {
#if defined(__APPLE__)
    return true;
#elif defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return false;
#endif
}

inline bool has_i8mm() {
#if defined(__APPLE__)
    int has = 0;
    size_t size = sizeof(has);
    return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) == 0 && has;
#elif defined(__linux__) && defined(HWCAP2_I8MM)
    return getauxval(AT_HWCAP2) & HWCAP2_I8MM;
#else
    return false;
#endif
}

// Four of a group's scales or offsets, from number `at` of w.scales on.
inline float32x4_t scales_at(const Weight &w, int64_t at) {
    if (w.half_scales)
        return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)w.scales + at)));
    return vld1q_f32((const float *)w.scales + at);
}

// Codes of step `j` of a block and quarter `q` of its outputs, as signed numbers: those of 8 bits less 128.
template <int BITS> inline int8x16_t codes_at(const uint8_t *block, int j, int q) {
    uint8x16_t codes = vld1q_u8(block + (BITS == 8 ? j : j % 4) * 64 + q * 16);
    if (BITS == 8)
        codes = veorq_u8(codes, vdupq_n_u8(0x80));
    else
        codes = j < 4 ? vandq_u8(codes, vdupq_n_u8(15)) : vshrq_n_u8(codes, 4);
    return vreinterpretq_s8_u8(codes);
}

// `half` of a tile: 8 outputs of COUNT rows. PARTS: groups of a block; 0 if a group has several blocks.
template <int COUNT, int BITS, int PARTS>
FOR_DOT void neon_half(const Weight &w, const RoundedRows &in, int64_t tile, int64_t row, int half, float *totals) {
    constexpr int64_t BYTES = BLOCK * TILE * BITS / 8;
    constexpr int NUM_PARTS = PARTS ? PARTS : 1, STEPS = 8 / NUM_PARTS, WIDE = 2;  // vectors of 4 outputs
    const int8x16_t ones = vdupq_n_s8(1);
    const uint8_t *codes = w.codes + tile * in.blocks * BYTES;
    int64_t per_group = PARTS ? 1 : w.group / BLOCK, at = tile * in.groups * 2 * TILE + half * 8;
    float32x4_t total[COUNT][WIDE];
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < WIDE; v++)
            total[r][v] = vdupq_n_f32(0.0f);
    for (int64_t g = 0; g < in.groups; g++, at += 2 * TILE) {
        float32x4_t partial[COUNT][WIDE];
        for (int r = 0; r < COUNT; r++)
            for (int v = 0; v < WIDE; v++)
                partial[r][v] = vdupq_n_f32(0.0f);
        int64_t first = g / NUM_PARTS * per_group, begin = g % NUM_PARTS * STEPS;
        for (int64_t b = first; b < first + per_group; b++) {
            const int8_t *numbers = in.block(b, row);
            const float *steps = in.steps_of(b, row);
            int32x4_t whole[COUNT][WIDE], inputs[COUNT];
            for (int r = 0; r < COUNT; r++) {
                inputs[r] = vdupq_n_s32(0);
                for (int v = 0; v < WIDE; v++)
                    whole[r][v] = vdupq_n_s32(0);
            }
            for (int j = begin; j < begin + STEPS; j++) {
                int8x16_t code[WIDE];
                for (int v = 0; v < WIDE; v++)
                    code[v] = codes_at<BITS>(codes + b * BYTES, j, half * WIDE + v);
                for (int r = 0; r < COUNT; r++) {
                    int8x16_t input = vreinterpretq_s8_s32(vdupq_n_s32(word(numbers + r * BLOCK + 4 * j)));
                    for (int v = 0; v < WIDE; v++)
                        whole[r][v] = vdotq_s32(whole[r][v], code[v], input);
                    if (BITS == 8)
                        inputs[r] = vdotq_s32(inputs[r], ones, input);
                }
            }
            for (int r = 0; r < COUNT; r++)
                for (int v = 0; v < WIDE; v++) {
                    int32x4_t sum = whole[r][v];
                    if (BITS == 8)  // 128 of each input are added again
                        sum = vaddq_s32(sum, vshlq_n_s32(inputs[r], 7));
                    partial[r][v] = vfmaq_n_f32(partial[r][v], vcvtq_f32_s32(sum), steps[r]);
                }
        }
        for (int v = 0; v < WIDE; v++) {
            float32x4_t scale = scales_at(w, at + 4 * v), offset = scales_at(w, at + TILE + 4 * v);
            for (int r = 0; r < COUNT; r++) {
                total[r][v] = vfmaq_f32(total[r][v], partial[r][v], scale);
                total[r][v] = vfmaq_n_f32(total[r][v], offset, in.sums_of(g, row)[r]);
            }
        }
    }
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < WIDE; v++)
            vst1q_f32(totals + r * TILE + half * 8 + 4 * v, total[r][v]);
}

template <int BITS, int PARTS>
void neon(const Weight &w, const RoundedRows &in, int64_t tile, int64_t row, int count, float *totals) {
    for (int half = 0; half < 2; half++)
        by_count<4>(count, [&](auto num, int64_t r) {
            neon_half<num, BITS, PARTS>(w, in, tile, row + r, half, totals + r * TILE);
        });
}

// Inputs 8 * k .. 8 * k + 7 of a block of two rows.
inline int8x16_t two_rows(const int8_t *numbers, int k) {
    return vcombine_s8(vld1_s8(numbers + 8 * k), vld1_s8(numbers + BLOCK + 8 * k));
}

inline int32x4_t low_halves(int32x4_t a, int32x4_t b) { return vcombine_s32(vget_low_s32(a), vget_low_s32(b)); }
inline int32x4_t high_halves(int32x4_t a, int32x4_t b) { return vcombine_s32(vget_high_s32(a), vget_high_s32(b)); }

// As neon_half, of PAIRS pairs of rows: a product's sums are those of two outputs of one row, and then of the other.
template <int PAIRS, int BITS, int PARTS>
FOR_I8MM void i8mm_half(const Weight &w, const RoundedRows &in, int64_t tile, int64_t row, int half, float *totals) {
    constexpr int64_t BYTES = BLOCK * TILE * BITS / 8;
    constexpr int NUM_PARTS = PARTS ? PARTS : 1, STEPS = 4 / NUM_PARTS,
                  WIDE = 2;  // steps of 8 inputs; vectors of 4 outputs
    const int8x16_t ones = vdupq_n_s8(1);
    const uint8_t *codes = w.codes + tile * in.blocks * BYTES;
    int64_t per_group = PARTS ? 1 : w.group / BLOCK, at = tile * in.groups * 2 * TILE + half * 8;
    float32x4_t total[2 * PAIRS][WIDE];
    for (int r = 0; r < 2 * PAIRS; r++)
        for (int v = 0; v < WIDE; v++)
            total[r][v] = vdupq_n_f32(0.0f);
    for (int64_t g = 0; g < in.groups; g++, at += 2 * TILE) {
        float32x4_t partial[2 * PAIRS][WIDE];
        for (int r = 0; r < 2 * PAIRS; r++)
            for (int v = 0; v < WIDE; v++)
                partial[r][v] = vdupq_n_f32(0.0f);
        int64_t first = g / NUM_PARTS * per_group, begin = g % NUM_PARTS * STEPS;
        for (int64_t b = first; b < first + per_group; b++) {
            const int8_t *numbers = in.block(b, row);
            const float *steps = in.steps_of(b, row);
            int32x4_t whole[PAIRS][2 * WIDE], inputs[PAIRS];
            for (int p = 0; p < PAIRS; p++) {
                inputs[p] = vdupq_n_s32(0);
                for (int v = 0; v < 2 * WIDE; v++)
                    whole[p][v] = vdupq_n_s32(0);
            }
            for (int k = begin; k < begin + STEPS; k++) {
                int8x16_t code[2 * WIDE];  // 8 inputs of 2 outputs
                for (int v = 0; v < WIDE; v++) {
                    int32x4_t even = vreinterpretq_s32_s8(codes_at<BITS>(codes + b * BYTES, 2 * k, half * WIDE + v));
                    int32x4_t odd = vreinterpretq_s32_s8(codes_at<BITS>(codes + b * BYTES, 2 * k + 1, half * WIDE + v));
                    code[2 * v] = vreinterpretq_s8_s32(vzip1q_s32(even, odd));
                    code[2 * v + 1] = vreinterpretq_s8_s32(vzip2q_s32(even, odd));
                }
                for (int p = 0; p < PAIRS; p++) {
                    int8x16_t input = two_rows(numbers + 2 * p * BLOCK, k);
                    for (int v = 0; v < 2 * WIDE; v++)
                        whole[p][v] = vmmlaq_s32(whole[p][v], input, code[v]);
                    if (BITS == 8)
                        inputs[p] = vmmlaq_s32(inputs[p], input, ones);
                }
            }
            for (int p = 0; p < PAIRS; p++) {
                if (BITS == 8)  // 128 of each input are added again
                    for (int v = 0; v < 2 * WIDE; v++)
                        whole[p][v] = vaddq_s32(whole[p][v], vshlq_n_s32(inputs[p], 7));
                for (int v = 0; v < WIDE; v++) {
                    int32x4_t one = low_halves(whole[p][2 * v], whole[p][2 * v + 1]);
                    int32x4_t other = high_halves(whole[p][2 * v], whole[p][2 * v + 1]);
                    float32x4_t &first_row = partial[2 * p][v], &second_row = partial[2 * p + 1][v];
                    first_row = vfmaq_n_f32(first_row, vcvtq_f32_s32(one), steps[2 * p]);
                    second_row = vfmaq_n_f32(second_row, vcvtq_f32_s32(other), steps[2 * p + 1]);
                }
            }
        }
        for (int v = 0; v < WIDE; v++) {
            float32x4_t scale = scales_at(w, at + 4 * v), offset = scales_at(w, at + TILE + 4 * v);
            for (int r = 0; r < 2 * PAIRS; r++) {
                total[r][v] = vfmaq_f32(total[r][v], partial[r][v], scale);
                total[r][v] = vfmaq_n_f32(total[r][v], offset, in.sums_of(g, row)[r]);
            }
        }
    }
    for (int r = 0; r < 2 * PAIRS; r++)
        for (int v = 0; v < WIDE; v++)
            vst1q_f32(totals + r * TILE + half * 8 + 4 * v, total[r][v]);
}

// Pairs of rows by i8mm, and a last single one by dot products.
template <int BITS, int PARTS>
void neon_i8mm(const Weight &w, const RoundedRows &in, int64_t tile, int64_t row, int count, float *totals) {
    for (int half = 0; half < 2; half++) {
        by_count<2>(count / 2, [&](auto num, int64_t pair) {
            i8mm_half<num, BITS, PARTS>(w, in, tile, row + 2 * pair, half, totals + 2 * pair * TILE);
        });
        if (count % 2)
            neon_half<1, BITS, PARTS>(w, in, tile, row + count - 1, half, totals + (count - 1) * TILE);
    }
}

}  // namespace
