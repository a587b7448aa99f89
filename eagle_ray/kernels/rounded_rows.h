// The rows that are multiplied by quantised weights, rounded to 8 bits.
//
// In each block of BLOCK inputs of a row, input i is about step * numbers[i], with numbers in -127 .. 127. A row with a
// number that is not finite has steps of NaN. Rows lie in groups of ROWS: a product of up to ROWS rows reads one stream.

#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

constexpr int64_t BLOCK = 32, ROWS = 8;

// Rows as a weight reads them: its groups decide which sums they have.
struct RoundedRows {
    int8_t *numbers;               // [rows / ROWS, blocks, ROWS, BLOCK]
    float *steps, *sums;           // [rows / ROWS, blocks or groups, ROWS]; sums: of a group's step * numbers
    int64_t blocks, groups, part;  // part: inputs of a group or of a block, whichever is smaller

    static int64_t at(int64_t piece, int64_t pieces, int64_t row) {
        return (row / ROWS * pieces + piece) * ROWS + row % ROWS;
    }
    const int8_t *block(int64_t b, int64_t row) const { return numbers + at(b, blocks, row) * BLOCK; }
    const float *steps_of(int64_t b, int64_t row) const { return steps + at(b, blocks, row); }
    const float *sums_of(int64_t g, int64_t row) const { return sums + at(g, groups, row); }
};

// Room for rounded rows.
class RowBuffer {
public:
    // Not while others round or read.
    void reserve(int64_t rows, int64_t inputs) {
        int64_t size = (rows + ROWS - 1) / ROWS * ROWS * inputs;
        numbers.resize(size);
        steps.resize(size / BLOCK);
        sums.resize(size / SMALLEST_GROUP);
    }

    RoundedRows rows_of(const Weight &w) {
        return {numbers.data(),   steps.data(),       sums.data(),
                w.inputs / BLOCK, w.inputs / w.group, std::min(w.group, BLOCK)};
    }

private:
    static constexpr int64_t SMALLEST_GROUP = BLOCK / 2;
    std::vector<int8_t> numbers;
    std::vector<float> steps, sums;
};

namespace {

inline void add_sums(const RoundedRows &to, int64_t row, int64_t b, const Ints *whole, float step) {
    int64_t vectors = to.part / LANES, group = to.blocks * BLOCK / to.groups;
    for (int64_t i = 0; i < BLOCK; i += to.part) {
        Ints total = {};
        for (int64_t v = i / LANES; v < i / LANES + vectors; v++)
            total += whole[v];
        float &at_group = to.sums[RoundedRows::at((b * BLOCK + i) / group, to.groups, row)];
        at_group = __builtin_fmaf(step, (float)sum(total), at_group);
    }
}

template <typename T> void round_block(const RoundedRows &to, int64_t row, int64_t b, const T *from) {
    constexpr int VECTORS = BLOCK / LANES;
    typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1)));
    Floats values[VECTORS];
    Ints most = {};  // the bits of magnitudes: they are in the order of the numbers
    for (int v = 0; v < VECTORS; v++) {
        values[v] = load(from + v * LANES);
        Ints magnitude = (Ints)values[v] & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    int32_t bits = largest(most);
    float peak;
    memcpy(&peak, &bits, 4);
    bool is_finite = std::isfinite(peak);
    float step = is_finite ? peak / 127.0f : NAN;
    float inverse = is_finite && peak > 0 ? 127.0f / peak : 0.0f;
    if (!std::isfinite(inverse))  // of the smallest numbers there are
        inverse = 0.0f;

    int8_t *numbers = to.numbers + RoundedRows::at(b, to.blocks, row) * BLOCK;
    Ints whole[VECTORS];
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    for (int v = 0; v < VECTORS; v++) {
        Floats scaled = is_finite ? unfused(values[v] * inverse) : Floats{};
        whole[v] = __builtin_convertvector((scaled + magic) - magic, Ints);
        *reinterpret_cast<Bytes *>(numbers + v * LANES) = __builtin_convertvector(whole[v], Bytes);
    }
    to.steps[RoundedRows::at(b, to.blocks, row)] = step;
    add_sums(to, row, b, whole, step);
}

// Rounds blocks [first, last) of a row, which are whole groups. from: the first of their inputs.
template <typename T>
void round_blocks(const RoundedRows &to, int64_t row, int64_t first, int64_t last, const T *from) {
    int64_t group = to.blocks * BLOCK / to.groups;
    for (int64_t g = first * BLOCK / group; g < last * BLOCK / group; g++)
        to.sums[RoundedRows::at(g, to.groups, row)] = 0.0f;
    for (int64_t b = first; b < last; b++, from += BLOCK)
        round_block(to, row, b, from);
}

template <typename T> void round_row(const RoundedRows &to, int64_t row, const T *from) {
    round_blocks(to, row, 0, to.blocks, from);
}

}  // namespace
