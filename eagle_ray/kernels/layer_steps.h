// The steps of a decoder layer between its products, as steps of a region of the team: each rounds the rows that the next
// product reads.

#pragma once

#include <algorithm>
#include <vector>

#include "quantized_matmul.h"
#include "rounded_rows.h"
#include "row_ops.h"
#include "team.h"

namespace {

// Norms rows [rows, size].
inline void round_normed(const team::Member &member, const float *from, int64_t rows, int64_t size, const float *weight,
                         float eps, const RoundedRows &to) {
    thread_local std::vector<float> normed;
    normed.resize(size);
    for (int64_t r : member.share(rows)) {
        norm_row(normed.data(), from + r * size, weight, size, eps);
        round_row(to, r, normed.data());
    }
}

// The pieces of a row that can be rounded by themselves: groups, or blocks if those are larger.
inline int64_t pieces_of(const RoundedRows &rows) { return std::min(rows.groups, rows.blocks); }

inline void round_rows(const team::Member &member, const float *from, int64_t rows, const RoundedRows &to) {
    int64_t pieces = pieces_of(to), blocks = to.blocks / pieces;
    for (int64_t task : member.share(rows * pieces)) {
        int64_t r = task / pieces, first = task % pieces * blocks;
        round_blocks(to, r, first, first + blocks, from + (r * to.blocks + first) * BLOCK);
    }
}

// SiLU(gate) * up of rows that hold gate and then up.
inline void round_activated(const team::Member &member, const float *gate_up, int64_t rows, const RoundedRows &to) {
    int64_t pieces = pieces_of(to), blocks = to.blocks / pieces, width = blocks * BLOCK, size = to.blocks * BLOCK;
    thread_local std::vector<float> activated;
    activated.resize(width);
    for (int64_t task : member.share(rows * pieces)) {
        int64_t r = task / pieces, first = task % pieces * blocks;
        const float *gate = gate_up + r * 2 * size + first * BLOCK;
        silu_mul_row(activated.data(), gate, gate + size, width);
        round_blocks(to, r, first, first + blocks, activated.data());
    }
}

// What a region's products share: the member that computes its part of them, and the rows that the next one reads.
struct Products {
    const team::Member &member;
    RowBuffer &buffer;

    RoundedRows rounded(const Projection &projection) const { return buffer.rows_of(*projection.weight); }

    // Multiplies the rounded rows of all members, and lets all read what came out.
    void multiply(float *out, bool adds, const Projection &projection, int64_t rows) const {
        member.barrier();
        multiply_share(member, out, adds, projection, rounded(projection), rows);
        member.barrier();
    }
};

// A layer's steps behind its attention, which add what they make to hidden [rows, size].
template <typename Layer>
void finish_layer(const Products &products, const Layer &l, const float *attended, float *hidden, float *gate_up,
                  int64_t rows, int64_t size) {
    const team::Member &member = products.member;
    round_rows(member, attended, rows, products.rounded(l.output));
    products.multiply(hidden, true, l.output, rows);
    round_normed(member, hidden, rows, size, l.post_norm, l.post_eps, products.rounded(l.gate_up));
    products.multiply(gate_up, false, l.gate_up, rows);
    round_activated(member, gate_up, rows, products.rounded(l.down));
    products.multiply(hidden, true, l.down, rows);
}

}  // namespace
