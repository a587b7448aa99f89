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

// Norms rows [rows, size]. kept: where the normed rows are written, too, or null.
inline void round_normed(const team::Member &member, const float *from, int64_t rows, int64_t size, const float *weight,
                         float eps, const RoundedRows &to, float *kept = nullptr) {
    thread_local std::vector<float> of_thread;
    of_thread.resize(size);
    float *room = of_thread.data();
    round_share(member, to, rows, [&](int64_t r, int64_t first, int64_t last) {
        const float *row = from + r * size;
        int64_t at = first * BLOCK;
        float *normed = kept ? kept + r * size + at : room;
        scale_row(normed, row + at, weight + at, (last - first) * BLOCK, inverse_rms(row, size, eps));
        return normed;
    });
}

// SiLU(gate) * up of rows that hold gate and then up.
inline void round_activated(const team::Member &member, const float *gate_up, int64_t rows, const RoundedRows &to) {
    int64_t size = to.blocks * BLOCK;
    thread_local std::vector<float> of_thread;
    of_thread.resize(size);
    float *activated = of_thread.data();
    round_share(member, to, rows, [&](int64_t r, int64_t first, int64_t last) {
        const float *gate = gate_up + r * 2 * size + first * BLOCK;
        silu_mul_row(activated, gate, gate + size, (last - first) * BLOCK);
        return activated;
    });
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
