// Products of a tile by AVX-512's VNNI: see quantized_matmul.cpp, which says in what order an output is summed.

#pragma once

#include <immintrin.h>

#include "quantized_tiles.h"

namespace {

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
FOR_VNNI void vnni_rows(const Weight &w, const RoundedRows &in, int64_t tile, int64_t row, const Fetch &fetch,
                        float *totals) {
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
                if (part == 0)
                    fetch(codes + c * BYTES);
                __m512i code[STEPS];
#pragma GCC unroll 8
                for (int j = 0; j < STEPS; j++) {
                    int step = part * STEPS + j;
                    code[j] = _mm512_loadu_si512(codes + c * BYTES + (BITS == 8 ? step : step % 4) * 64);
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

constexpr int64_t VNNI_ROWS = 8;  // at most, which read the codes once

// before: groups of other rows that have read the tile already.
template <int BITS, int PARTS>
void vnni_groups(const Weight &w, const RoundedRows &in, int64_t tile, int64_t row, int64_t count, int64_t before,
                 float *totals) {
    int64_t groups = before + (count + VNNI_ROWS - 1) / VNNI_ROWS;
    by_count<VNNI_ROWS>(count, [&](auto num, int64_t r) {
        const Fetch fetch(BITS, in.blocks, before + r / VNNI_ROWS, groups);
        vnni_rows<num, BITS, PARTS>(w, in, tile, row + r, fetch, totals + r * TILE);
    });
}

template <int BITS, int PARTS>
void vnni(const Weight &w, const RoundedRows &in, int64_t tile, int64_t row, int count, float *totals) {
    vnni_groups<BITS, PARTS>(w, in, tile, row, count, 0, totals);
}

}  // namespace
