// What a decoder layer does to one row beside its products, in fp32 and bf16: norm, sum and activation.
//
// All sums are in fp32 and in an order that depends on the row alone: a row's result is the same bits in any batch.

#pragma once

#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace {

template <typename T> float inverse_rms(const T *row, int64_t size, float eps) {
    Floats squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        Floats x = load_upto(row + i, size - i);
        squares += x * x;
    }
    return 1.0f / std::sqrt(sum(squares) / size + eps);
}

// row * scale * weight, of `size` numbers. scale: the inverse_rms of the whole row.
template <typename T> void scale_row(T *out, const T *row, const T *weight, int64_t size, float scale) {
    for (int64_t i = 0; i < size; i += LANES) {
        Floats x = rounded(load_upto(row + i, size - i) * scale, row);
        store_upto(out + i, x * load_upto(weight + i, size - i), size - i);
    }
}

template <typename T> void norm_row(T *out, const T *row, const T *weight, int64_t size, float eps) {
    scale_row(out, row, weight, size, inverse_rms(row, size, eps));
}

template <typename T> void add_row(T *row, const T *delta, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES)
        store_upto(row + i, load_upto(row + i, size - i) + load_upto(delta + i, size - i), size - i);
}

// SiLU(gate) * up of `size` numbers.
template <typename T> void silu_mul_row(T *out, const T *gate, const T *up, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        Floats g = load_upto(gate + i, size - i);
        Floats activated = rounded(g / (1.0f + exp_of(-g)), gate);
        store_upto(out + i, activated * load_upto(up + i, size - i), size - i);
    }
}

// GELU(gate) * up of `size` numbers, by tanh's approximation: (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)).
template <typename T> void gelu_tanh_mul_row(T *out, const T *gate, const T *up, int64_t size) {
    constexpr float TWICE = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
    for (int64_t i = 0; i < size; i += LANES) {
        Floats g = load_upto(gate + i, size - i);
        Floats y = TWICE * (g + 0.044715f * g * g * g);
        Floats activated = rounded(g / (1.0f + exp_of(-y)), gate);
        store_upto(out + i, activated * load_upto(up + i, size - i), size - i);
    }
}

}  // namespace
