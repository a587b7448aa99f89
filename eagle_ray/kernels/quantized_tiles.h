// What the products of a tile share: see quantized_matmul.cpp.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "rounded_rows.h"

namespace {

constexpr int64_t TILE = 16;     // outputs whose codes lie together
constexpr int64_t AHEAD = 2048;  // bytes of codes that are fetched before they are read

// Computes rows [row, row + count) of a tile's outputs: totals[r * TILE + lane]. row: a multiple of ROWS.
using TileFunction = void (*)(const Weight &, const RoundedRows &, int64_t tile, int64_t row, int count, float *totals);

// Four successive numbers.
inline int32_t word(const int8_t *from) {
    int32_t four;
    memcpy(&four, from, 4);
    return four;
}

// Calls function(N, row) for rows 0 .. count - 1, N rows at a time: MOST, and at last those that are left. N is a constant.
template <int MOST, typename Function> void by_rows(int count, const Function &function, int row = 0) {
    for (; row + MOST <= count; row += MOST)
        function(std::integral_constant<int, MOST>(), row);
    if constexpr (MOST > 1)
        by_rows<MOST - 1>(count, function, row);
}

}  // namespace
