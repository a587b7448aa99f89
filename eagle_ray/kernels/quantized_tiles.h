// What the products of a tile share: see quantized_matmul.cpp.

#pragma once

#include <cstdint>
#include <algorithm>
#include <cstring>

#include "rounded_rows.h"

namespace {

constexpr int64_t TILE = 16;  // outputs whose codes lie together

// Fetches codes before they are read.
//
// Rows are multiplied in groups, and each group reads all codes of a tile. While it does, it fetches its part of each
// block of the next tile, so that memory is at work all the time. One group alone is fast, and fetches what it reads soon.
class Fetch {
public:
    // The group-th of `groups`.
    Fetch(int64_t bits, int64_t blocks, int64_t group, int64_t groups) {
        int64_t lines = bits, each = (lines + groups - 1) / groups;  // of 64 bytes
        distance = blocks * lines * 64;
        if (groups == 1)
            distance = std::min(distance, SOON);
        first = std::min(group * each, lines);
        last = std::min(first + each, lines);
    }

    // codes: of the block that is read now.
    void operator()(const uint8_t *codes) const {
        for (int64_t line = first; line < last; line++)
            __builtin_prefetch(codes + distance + line * 64, 0, SECOND_LEVEL);
    }

private:
    static constexpr int64_t SOON = 4096;
    static constexpr int SECOND_LEVEL = 2;  // of the caches: the first one holds this tile and the rows
    int64_t distance, first, last;
};

// Computes rows [row, row + count) of a tile's outputs: totals[r * TILE + lane]. row: a multiple of ROWS.
using TileFunction = void (*)(const Weight &, const RoundedRows &, int64_t tile, int64_t row, int count, float *totals);

// Four successive numbers.
inline int32_t word(const int8_t *from) {
    int32_t four;
    memcpy(&four, from, 4);
    return four;
}

}  // namespace
