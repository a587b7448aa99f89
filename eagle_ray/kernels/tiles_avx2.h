// Products of a tile by AVX2, and by the dot products that processors without AVX-512 have since 2021 (AVX-VNNI): see
// quantized_matmul.cpp, which says in what order an output is summed.

#pragma once

#include <immintrin.h>

#include "quantized_tiles.h"

namespace {

// Adds to each of 8 sums the products of 4 codes and 4 inputs.
inline __m256i add_dots(__m256i sums, __m256i codes, __m256i inputs) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(codes), "x"(inputs));
    return sums;
}

// `half` of a tile: 8 outputs of COUNT rows. PARTS: groups of a block; 0 if a group has several blocks.
template <int COUNT, int BITS, int PARTS, bool HAS_DOTS>
void avx2_half(const Weight &w, const RoundedRows &in, int64_t tile, int64_t row, int half, const Fetch &fetch,
               float *totals) {
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
            if (begin == 0)
                fetch(codes + b * BYTES);
            __m256i whole[COUNT], inputs[COUNT];  // inputs: sums of pairs of inputs, of 16 bits
            for (int r = 0; r < COUNT; r++)
                whole[r] = inputs[r] = _mm256_setzero_si256();
            for (int64_t j = begin; j < begin + STEPS; j++) {
                const uint8_t *from = codes + b * BYTES + (BITS == 8 ? j : j % 4) * 64;
                __m256i code = _mm256_loadu_si256((const __m256i *)from);
                if (BITS == 4)
                    code = _mm256_and_si256(j < 4 ? code : _mm256_srli_epi16(code, 4), low);
                for (int r = 0; r < COUNT; r++) {
                    __m256i input = _mm256_set1_epi32(word(numbers + r * BLOCK + 4 * j));
                    if (HAS_DOTS)
                        whole[r] = add_dots(whole[r], code, input);
                    else if (BITS == 4)  // the sums of two products take 12 bits, and those of a block 15
                        whole[r] = _mm256_add_epi16(whole[r], _mm256_maddubs_epi16(code, input));
                    else {  // with a sign, code - 128 and an input fit: pairs take 16 bits
                        __m256i centred = _mm256_xor_si256(code, _mm256_set1_epi8((char)0x80));
                        __m256i pair = _mm256_maddubs_epi16(_mm256_abs_epi8(centred), _mm256_sign_epi8(input, centred));
                        whole[r] = _mm256_add_epi32(whole[r], _mm256_madd_epi16(pair, ones));
                        inputs[r] = _mm256_add_epi16(inputs[r], _mm256_maddubs_epi16(_mm256_set1_epi8(1), input));
                    }
                }
            }
            for (int r = 0; r < COUNT; r++) {
                __m256i sum = BITS == 4 && !HAS_DOTS ? _mm256_madd_epi16(whole[r], ones) : whole[r];
                if (BITS == 8 && !HAS_DOTS)  // 128 of each input are added again
                    sum = _mm256_add_epi32(sum, _mm256_slli_epi32(_mm256_madd_epi16(inputs[r], ones), 7));
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

template <int BITS, int PARTS, bool HAS_DOTS>
void avx2(const Weight &w, const RoundedRows &in, int64_t tile, int64_t row, int count, float *totals) {
    constexpr int64_t MOST = 4;
    int64_t groups = (count + MOST - 1) / MOST;
    for (int half = 0; half < 2; half++)
        by_count<MOST>(count, [&](auto num, int64_t r) {
            const Fetch fetch(BITS, in.blocks, half * groups + r / MOST, 2 * groups);
            avx2_half<num, BITS, PARTS, HAS_DOTS>(w, in, tile, row + r, half, fetch, totals + r * TILE);
        });
}

}  // namespace
