// The rows that are multiplied by quantised weights, rounded to 8 bits.
//
// In each block of BLOCK inputs of a row, input i is about step * numbers[i], with numbers in -127 .. 127. A row with a
// number that is not finite has steps of NaN. Rows lie in groups of ROWS: a product of up to ROWS rows reads one stream.

#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "team.h"
#include "vectors.h"

constexpr int64_t BLOCK = 32, ROWS = 16;

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

// Blocks that are rounded at once: one alone would wait for its own largest number.
constexpr int SIDE_BY_SIDE = 4;

// Adds COUNT blocks to the sums of their groups. whole: the rounded numbers of each block.
template <int COUNT>
void add_sums(const RoundedRows &to, int64_t row, int64_t b, const Ints (*whole)[BLOCK / LANES], Floats4 steps) {
    int64_t vectors = to.part / LANES, group = to.blocks * BLOCK / to.groups;
    for (int64_t first = 0; first < BLOCK / LANES; first += vectors) {
        Ints totals[SIDE_BY_SIDE] = {};
        for (int k = 0; k < COUNT; k++)
            for (int64_t v = first; v < first + vectors; v++)
                totals[k] += whole[k][v];
        Floats4 found = __builtin_convertvector(sums(totals), Floats4);
        for (int k = 0; k < COUNT; k++) {
            int64_t g = ((b + k) * BLOCK + first * LANES) / group;
            float &at_group = to.sums[RoundedRows::at(g, to.groups, row)];
            at_group = __builtin_fmaf(steps[k], found[k], at_group);
        }
    }
}

template <int COUNT, typename T> void round_side_by_side(const RoundedRows &to, int64_t row, int64_t b, const T *from) {
    constexpr int VECTORS = BLOCK / LANES;
    typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1)));
    Floats values[COUNT][VECTORS];
    Ints most[SIDE_BY_SIDE] = {};  // the bits of magnitudes: they are in the order of the numbers
    for (int k = 0; k < COUNT; k++)
        for (int v = 0; v < VECTORS; v++) {
            values[k][v] = load(from + k * BLOCK + v * LANES);
            Ints magnitude = (Ints)values[k][v] & 0x7fffffff;
            most[k] = magnitude > most[k] ? magnitude : most[k];
        }
    const Ints4 peak_bits = largest(most), infinity = (Ints4)((Floats4){} + INFINITY);
    const Floats4 peaks = (Floats4)peak_bits;
    Ints4 is_finite = peak_bits < infinity;
    Floats4 steps = is_finite ? peaks / 127.0f : (Floats4){} + NAN;
    Floats4 inverses = 127.0f / peaks;
    inverses =
        is_finite & ((Ints4)inverses < infinity) ? inverses : (Floats4){};  // none of 0 and of the smallest numbers

    Ints whole[SIDE_BY_SIDE][VECTORS];
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
    for (int k = 0; k < COUNT; k++) {
        int8_t *numbers = to.numbers + RoundedRows::at(b + k, to.blocks, row) * BLOCK;
        for (int v = 0; v < VECTORS; v++) {
            Floats scaled = (Floats)((Ints)unfused(values[k][v] * inverses[k]) & is_finite[k]);
            whole[k][v] = __builtin_convertvector((scaled + magic) - magic, Ints);
            *reinterpret_cast<Bytes *>(numbers + v * LANES) = __builtin_convertvector(whole[k][v], Bytes);
        }
        to.steps[RoundedRows::at(b + k, to.blocks, row)] = steps[k];
    }
    add_sums<COUNT>(to, row, b, whole, steps);
}

// Rounds blocks [first, last) of a row, which are whole groups. from: the first of their inputs.
template <typename T>
void round_blocks(const RoundedRows &to, int64_t row, int64_t first, int64_t last, const T *from) {
    int64_t group = to.blocks * BLOCK / to.groups;
    for (int64_t g = first * BLOCK / group; g < last * BLOCK / group; g++)
        to.sums[RoundedRows::at(g, to.groups, row)] = 0.0f;
    by_count<SIDE_BY_SIDE>(last - first, [&](auto count, int64_t done) {
        round_side_by_side<count>(to, row, first + done, from + done * BLOCK);
    });
}

template <typename T> void round_row(const RoundedRows &to, int64_t row, const T *from) {
    round_blocks(to, row, 0, to.blocks, from);
}

// Rounds the member's share of all rows. inputs_of(row, first, last): the inputs of its blocks [first, last).
//
// The blocks of a group of ROWS rows are shared out, and not its rows: those share cache lines, for which members wait.
template <typename InputsOf>
void round_share(const team::Member &member, const RoundedRows &to, int64_t rows, const InputsOf &inputs_of) {
    int64_t pieces = std::min(to.groups, to.blocks), blocks = to.blocks / pieces;  // pieces: whole groups
    const team::Span mine = member.share((rows + ROWS - 1) / ROWS * pieces);
    for (int64_t at = mine.first; at < mine.last;) {
        int64_t group = at / pieces, first = at % pieces, last = std::min(pieces, first + mine.last - at);
        for (int64_t r = group * ROWS; r < std::min(rows, (group + 1) * ROWS); r++)
            round_blocks(to, r, first * blocks, last * blocks, inputs_of(r, first * blocks, last * blocks));
        at += last - first;
    }
}

// Rows [rows, inputs].
template <typename T> void round_rows(const team::Member &member, const T *from, int64_t rows, const RoundedRows &to) {
    round_share(member, to, rows,
                [&](int64_t r, int64_t first, int64_t) { return from + (r * to.blocks + first) * BLOCK; });
}

}  // namespace
