// Products of a tile by AMX: see quantized_matmul.cpp, which says in what order an output is summed.
//
// A tile register takes the integer sums of 16 rows and TILE outputs in one instruction; what is left of a block are its
// conversion and two or three sums in fp32, which bound the speed. Codes of 4 bits are unpacked once for all rows.

#pragma once

#if defined(__linux__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "tiles_vnni.h"

namespace {

#define FOR_AMX __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,amx-tile,amx-int8")))

constexpr int64_t TILE_ROWS = 16;  // of a tile register
constexpr int64_t MIN_AMX_ROWS = 2 * TILE_ROWS;
constexpr int64_t IN_FLIGHT = 4;  // pieces whose sums are under way at once: a sum takes longer than it blocks the unit

// Whether the processor has AMX and Linux lets this process use it: its registers are large, so that one has to ask.
inline bool has_amx() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-tile") &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// Sets a thread's tile registers up for products, and gives them back as they were: torch uses them, too.
// Registers 0 to 3 hold sums, 4 and 5 inputs, 6 and 7 codes.
class TileRegisters {
public:
    // inputs: of a row and a register.
    FOR_AMX explicit TileRegisters(int64_t inputs) {
        Layout mine;
        for (int i = 0; i < 8; i++) {
            bool is_code = i >= 6, is_input = i == 4 || i == 5;
            mine.rows[i] = is_code ? inputs / 4 : TILE_ROWS;
            mine.row_bytes[i] = is_input ? inputs : 64;
        }
        _tile_storeconfig(&before);
        asm volatile("" : : "r"(&mine) : "memory");  // GCC 12 believes that the next instruction reads 8 bytes
        _tile_loadconfig(&mine);
    }
    FOR_AMX ~TileRegisters() {
        asm volatile("" : : "r"(&before) : "memory");
        if (before.palette)
            _tile_loadconfig(&before);
        else
            _tile_release();
    }
    TileRegisters(const TileRegisters &) = delete;

private:
    struct alignas(64) Layout {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    Layout before;
};

// A tile's codes as bytes and its scales and offsets in fp32, in room of the thread.
template <int BITS> class OpenTile {
public:
    const uint8_t *codes;  // [blocks, BLOCK / 4, TILE, 4]
    const float *scales;   // [groups, 2, TILE]

    FOR_AMX OpenTile(const Weight &w, const RoundedRows &in, int64_t tile)
        : packed(w.codes + tile * in.blocks * BLOCK_BYTES) {
        thread_local std::vector<uint8_t> room_of_codes;
        thread_local std::vector<float> room_of_scales;
        if (BITS == 4)
            room_of_codes.resize(in.blocks * BLOCK * TILE);
        unpacked = room_of_codes.data();
        codes = BITS == 4 ? unpacked : packed;

        int64_t count = in.groups * 2 * TILE, at = tile * count;
        scales = (const float *)w.scales + at;
        if (!w.half_scales)
            return;
        room_of_scales.resize(count);
        scales = room_of_scales.data();
        for (int64_t i = 0; i < count; i += 2 * TILE) {
            __m512 scale, offset;
            load_scales(w, at + i, scale, offset);
            _mm512_storeu_ps(room_of_scales.data() + i, scale);
            _mm512_storeu_ps(room_of_scales.data() + i + TILE, offset);
        }
    }

    // Unpacks a block, whose codes are not there until then.
    FOR_AMX void unpack(int64_t block) const {
        if (BITS == 8)
            return;
        const __m512i low = _mm512_set1_epi8(15);
        const uint8_t *from = packed_block(block);
        uint8_t *to = unpacked + block * BLOCK * TILE;
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __m512i pairs = _mm512_loadu_si512(from + j * 64);
            _mm512_storeu_si512(to + j * 64, _mm512_and_si512(pairs, low));
            _mm512_storeu_si512(to + (j + 4) * 64, _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low));
        }
        asm volatile("" : : : "memory");  // GCC 12 does not know that loads of tile registers read them
    }

    const uint8_t *packed_block(int64_t block) const { return packed + block * BLOCK_BYTES; }

private:
    static constexpr int64_t BLOCK_BYTES = BLOCK * TILE * BITS / 8;
    const uint8_t *packed;
    uint8_t *unpacked;
};

using PieceSums = int32_t[IN_FLIGHT][TILE_ROWS * TILE];

// Integer sums of `count` pieces for TILE_ROWS rows. A piece: INPUTS inputs of a block.
template <int INPUTS>
FOR_AMX inline void sum_pieces(const uint8_t *codes, const int8_t *numbers, int64_t count, PieceSums &sums) {
    constexpr int64_t PIECES = BLOCK / INPUTS, CODES = INPUTS * TILE;
#define BEGIN(k, total, input, code)                                                                                   \
    if (k < count) {                                                                                                   \
        _tile_zero(total);                                                                                             \
        _tile_loadd(input, numbers + k / PIECES * ROWS * BLOCK + k % PIECES * INPUTS, BLOCK);                          \
        _tile_loadd(code, codes + k * CODES, 64);                                                                      \
        _tile_dpbsud(total, input, code);                                                                              \
    }
#define STORE(k)                                                                                                       \
    if (k < count)                                                                                                     \
        _tile_stored(k, sums[k], 64);
    BEGIN(0, 0, 4, 6);
    BEGIN(1, 1, 5, 7);
    BEGIN(2, 2, 4, 6);
    BEGIN(3, 3, 5, 7);
    STORE(0);
    STORE(1);
    STORE(2);
    STORE(3);
#undef BEGIN
#undef STORE
}

// Adds the sums of `count` pieces to the totals of TILE_ROWS rows.
template <int PARTS>
FOR_AMX inline void add_pieces(const RoundedRows &in, const float *scales, int64_t first, int64_t count, int64_t row,
                               const PieceSums &sums, float *partials, float *totals) {
    constexpr int64_t NUM_PARTS = PARTS ? PARTS : 1;
    const int64_t per_group = PARTS ? 1 : in.blocks / in.groups;
    __m512 total[TILE_ROWS], partial[TILE_ROWS];
    for (int r = 0; r < TILE_ROWS; r++) {
        total[r] = _mm512_loadu_ps(totals + r * TILE);
        partial[r] = PARTS ? _mm512_setzero_ps() : _mm512_load_ps(partials + r * TILE);
    }
    for (int64_t k = 0; k < count; k++) {
        int64_t piece = first + k, g = piece / per_group;
        const float *steps = in.steps_of(piece / NUM_PARTS, row);
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++) {
            __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums[k] + r * TILE)), step = _mm512_set1_ps(steps[r]);
            partial[r] = PARTS ? _mm512_mul_ps(sum, step) : _mm512_fmadd_ps(sum, step, partial[r]);
        }
        if (!PARTS && (piece + 1) % per_group)
            continue;
        __m512 scale = _mm512_loadu_ps(scales + g * 2 * TILE), offset = _mm512_loadu_ps(scales + (g * 2 + 1) * TILE);
        const float *input_sums = in.sums_of(g, row);
#pragma GCC unroll 16
        for (int r = 0; r < TILE_ROWS; r++) {
            total[r] = _mm512_fmadd_ps(partial[r], scale, total[r]);
            total[r] = _mm512_fmadd_ps(_mm512_set1_ps(input_sums[r]), offset, total[r]);
            partial[r] = _mm512_setzero_ps();
        }
    }
    for (int r = 0; r < TILE_ROWS; r++) {
        _mm512_storeu_ps(totals + r * TILE, total[r]);
        if (!PARTS)
            _mm512_store_ps(partials + r * TILE, partial[r]);
    }
}

// TILE_ROWS rows, which lie together. is_first: these rows unpack the tile's codes, while their first sums are under way.
template <int BITS, int PARTS>
FOR_AMX void amx_rows(const OpenTile<BITS> &tile, const RoundedRows &in, int64_t row, bool is_first, const Fetch &fetch,
                      float *totals) {
    constexpr int64_t NUM_PARTS = PARTS ? PARTS : 1, INPUTS = BLOCK / NUM_PARTS;
    alignas(64) PieceSums sums[2];
    alignas(64) float partials[TILE_ROWS * TILE] = {};
    const int64_t pieces = in.blocks * NUM_PARTS;
    const int8_t *numbers = in.block(0, row);
    auto open = [&](int64_t first) FOR_AMX {
        for (int64_t b = first / NUM_PARTS; b < std::min(first + IN_FLIGHT, pieces) / NUM_PARTS; b++) {
            fetch(tile.packed_block(b));
            if (is_first)
                tile.unpack(b);
        }
    };
    auto begin = [&](int64_t first) FOR_AMX {
        open(first + IN_FLIGHT);
        sum_pieces<INPUTS>(tile.codes + first * INPUTS * TILE, numbers + first / NUM_PARTS * ROWS * BLOCK,
                           std::min(pieces - first, IN_FLIGHT), sums[first / IN_FLIGHT % 2]);
    };
    std::fill(totals, totals + TILE_ROWS * TILE, 0.0f);
    open(0);
    begin(0);
    for (int64_t first = 0; first < pieces; first += IN_FLIGHT) {
        if (first + IN_FLIGHT < pieces)
            begin(first + IN_FLIGHT);
        add_pieces<PARTS>(in, tile.scales, first, std::min(pieces - first, IN_FLIGHT), row, sums[first / IN_FLIGHT % 2],
                          partials, totals);
    }
}

// Whole groups of TILE_ROWS rows by AMX, and what is left by VNNI. One group alone does not pay for unpacking.
template <int BITS, int PARTS>
FOR_AMX void amx(const Weight &w, const RoundedRows &in, int64_t tile, int64_t row, int count, float *totals) {
    const int64_t groups = count < MIN_AMX_ROWS ? 0 : count / TILE_ROWS, done = groups * TILE_ROWS;
    const int64_t readers = groups + (count - done + VNNI_ROWS - 1) / VNNI_ROWS;
    if (groups > 0) {
        const OpenTile<BITS> open(w, in, tile);
        for (int64_t i = 0; i < groups; i++)
            amx_rows<BITS, PARTS>(open, in, row + i * TILE_ROWS, i == 0, Fetch(BITS, in.blocks, i, readers),
                                  totals + i * TILE_ROWS * TILE);
    }
    vnni_groups<BITS, PARTS>(w, in, tile, row + done, count - done, groups, totals + done * TILE);
}

}  // namespace

#endif
