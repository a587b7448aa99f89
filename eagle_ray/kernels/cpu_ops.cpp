// The small operations of a decoder layer on a CPU, in fp32 and bf16: norms, rotary embedding and activation; and the
// likeliest tokens of logits. attention.cpp has the attention.
//
// cpu_ops.py loads this file's library and says what each function computes; torch does the matrix products. Vectors are
// GCC's vector extensions, so one source serves AVX-512, AVX2 and NEON. All sums are in fp32 and in an order that
// depends on the row alone, never on the other rows of the pass: a row's result is the same bits in any batch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_ops.h"
#include "parallel.h"
#include "row_ops.h"
#include "vectors.h"

namespace {

// --- norms and activation -------------------------------------------------------------------------------------------

template <typename T>
void add_rms_norm(T *out, T *residual, const T *delta, const T *weight, int64_t rows, int64_t size, float eps,
                  int threads) {
    parallel(rows > 1 && rows * size > SMALL ? threads : 1, [&](const team::Member &member) {
        for (int64_t r : member.share(rows)) {
            if (delta)
                add_row(residual + r * size, delta + r * size, size);
            norm_row(out + r * size, residual + r * size, weight, size, eps);
        }
    });
}

// What `row` computes of the gate and the other half of each row.
template <typename T, typename Row>
void gated(T *out, const T *gate_up, int64_t rows, int64_t size, int threads, Row row) {
    constexpr int64_t CHUNK = 512;
    int64_t chunks = (size + CHUNK - 1) / CHUNK;
    parallel(rows * size > SMALL ? threads : 1, [&](const team::Member &member) {
        for (int64_t task : member.share(rows * chunks)) {
            int64_t r = task / chunks, begin = task % chunks * CHUNK;
            const T *gate = gate_up + r * 2 * size + begin;
            row(out + r * size + begin, gate, gate + size, std::min(CHUNK, size - begin));
        }
    });
}

// --- rotary embedding -----------------------------------------------------------------------------------------------

// Rotates pairs (i, i + half) of one head. to may be from.
template <typename T, typename K>
void rotate(K *to, const T *from, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t left = half - i;
        Floats a = load_upto(from + i, left), b = load_upto(from + half + i, left);
        Floats c = load_upto(cosine + i, left), s = load_upto(sine + i, left);
        store_upto(to + i, a * c - b * s, left);
        store_upto(to + half + i, b * c + a * s, left);
    }
}

}  // namespace

template <typename T, typename K>
void rotate_and_write_rows(team::Span some, T *qkv, K *keys, K *values, const int64_t *cells, const float *cosine,
                           const float *sine, const T *q_norm, const T *k_norm, float eps, int64_t heads,
                           int64_t kv_heads, int64_t dim) {
    int64_t width = (heads + 2 * kv_heads) * dim, half = dim / 2;
    for (int64_t r : some) {
        const float *c = cosine + r * half, *s = sine + r * half;
        T *q = qkv + r * width, *k = q + heads * dim, *v = k + kv_heads * dim;
        for (int64_t h = 0; h < heads; h++) {
            if (q_norm)
                norm_row(q + h * dim, q + h * dim, q_norm, dim, eps);
            rotate(q + h * dim, q + h * dim, c, s, half);
        }
        K *key = keys + cells[r] * kv_heads * dim, *value = values + cells[r] * kv_heads * dim;
        for (int64_t h = 0; h < kv_heads; h++) {
            if (k_norm)
                norm_row(k + h * dim, k + h * dim, k_norm, dim, eps);
            rotate(key + h * dim, k + h * dim, c, s, half);
        }
        for (int64_t i = 0; i < kv_heads * dim; i += LANES)
            store_upto(value + i, load_upto(v + i, kv_heads * dim - i), kv_heads * dim - i);
    }
}

namespace {

template <typename T, typename K>
void rotate_and_write(T *qkv, K *keys, K *values, const int64_t *cells, const float *cosine, const float *sine,
                      const T *q_norm, const T *k_norm, float eps, int64_t rows, int64_t heads, int64_t kv_heads,
                      int64_t dim, int threads) {
    bool is_large = rows > 1 && rows * (heads + 2 * kv_heads) * dim > SMALL;
    parallel(is_large ? threads : 1, [&](const team::Member &member) {
        rotate_and_write_rows(member.share(rows), qkv, keys, values, cells, cosine, sine, q_norm, k_norm, eps, heads,
                              kv_heads, dim);
    });
}

// --- likeliest tokens -----------------------------------------------------------------------------------------------

// The k highest of a row, highest first, ties to the lower index: at index[0 .. k).
void highest(const float *row, int64_t size, int64_t k, int64_t *index) {
    constexpr int64_t CHUNK = 16 * LANES;
    int64_t found = 0;
    for (int64_t begin = 0; begin < size; begin += CHUNK) {
        int64_t end = std::min(begin + CHUNK, size);
        if (found == k && !(largest(row + begin, end - begin) > row[index[k - 1]]))
            continue;
        for (int64_t i = begin; i < end; i++) {
            if (found == k && !(row[i] > row[index[k - 1]]))
                continue;
            int64_t at = found < k ? found++ : k - 1;
            for (; at > 0 && row[i] > row[index[at - 1]]; at--)
                index[at] = index[at - 1];
            index[at] = i;
        }
    }
}

float log_sum_exp(const float *row, int64_t size, float most) {
    Floats total = {};
    for (int64_t i = 0; i < size; i += LANES) {
        Floats power = exp_of(load_upto(row + i, size - i) - most);
        total += size - i < LANES ? load_some((const float *)&power, size - i) : power;
    }
    return most + std::log(sum(total));
}

}  // namespace

void likeliest_of_row(int64_t *index, float *log_probs, const float *row, int64_t size, int64_t k) {
    highest(row, size, k, index);
    if (!log_probs)
        return;
    float whole = log_sum_exp(row, size, row[index[0]]);
    for (int64_t i = 0; i < k; i++)
        log_probs[i] = row[index[i]] - whole;
}

thread_local bool uses_team = false;

// Lets the calling thread compute in the team, and torch's operations in it on one thread, until it leaves. Returns how many
// threads OpenMP had for it; leave_team restores them.
extern "C" int join_team() {
    int threads = omp_get_max_threads();
    uses_team = true;
    omp_set_num_threads(1);
    return threads;
}

extern "C" void leave_team(int threads) {
    uses_team = false;
    omp_set_num_threads(threads);
}

extern "C" void likeliest_float32(int64_t *index, float *log_probs, const float *logits, int64_t rows, int64_t size,
                                  int64_t k, int threads) {
    parallel(rows > 1 && rows * size > SMALL ? threads : 1, [&](const team::Member &member) {
        for (int64_t r : member.share(rows)) {
            const float *row = logits + r * size;
            likeliest_of_row(index + r * k, log_probs ? log_probs + r * k : nullptr, row, size, k);
            int64_t nan = log_probs ? -1 : first_nan(row, size);
            if (nan >= 0)
                index[r * k] = nan;
        }
    });
}

#define FOR_DTYPE(T, NAME)                                                                                             \
    extern "C" void add_rms_norm_##NAME(T *out, T *residual, const T *delta, const T *weight, int64_t rows,            \
                                        int64_t size, float eps, int threads) {                                        \
        add_rms_norm(out, residual, delta, weight, rows, size, eps, threads);                                          \
    }                                                                                                                  \
    extern "C" void silu_mul_##NAME(T *out, const T *gate_up, int64_t rows, int64_t size, int threads) {               \
        gated(out, gate_up, rows, size, threads, silu_mul_row<T>);                                                     \
    }                                                                                                                  \
    extern "C" void gelu_tanh_mul_##NAME(T *out, const T *gate_up, int64_t rows, int64_t size, int threads) {          \
        gated(out, gate_up, rows, size, threads, gelu_tanh_mul_row<T>);                                                \
    }

#define FOR_CACHE(T, K, NAME)                                                                                          \
    extern "C" void rotate_and_write_##NAME(T *qkv, K *keys, K *values, const int64_t *cells, const float *cosine,     \
                                            const float *sine, const T *q_norm, const T *k_norm, float eps,            \
                                            int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int threads) { \
        rotate_and_write(qkv, keys, values, cells, cosine, sine, q_norm, k_norm, eps, rows, heads, kv_heads, dim,      \
                         threads);                                                                                     \
    }                                                                                                                  \
    template void rotate_and_write_rows(team::Span, T *, K *, K *, const int64_t *, const float *, const float *,      \
                                        const T *, const T *, float, int64_t, int64_t, int64_t);

FOR_DTYPE(float, float32)
FOR_DTYPE(bf16, bfloat16)
FOR_CACHE(float, float, float32)
FOR_CACHE(bf16, bf16, bfloat16)
FOR_CACHE(float, bf16, float32_bfloat16)
