// What the files of this library share: the structures that cpu_ops.py fills, and the functions of a decoder layer.

#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "team.h"

struct bf16 {
    uint16_t bits;
};

// What each of R rows sees: columns [begin, end) of its sequence, then those of `columns` tree columns from `trunk` on
// that its mask names. Column c of a sequence lies in cell table[slot][c / block_size] * block_size + c % block_size.
struct Rows {
    int64_t rows, columns, block_size, table_width;
    const int64_t *table, *slots, *begin, *end, *trunk;
    const uint8_t *mask;
};

// Strides of the queries are in numbers; keys and values are [cells, kv_heads, dim], the output [rows, heads, value_dim].
struct Heads {
    int64_t heads, kv_heads, key_dim, value_dim, row_stride, head_stride;
    float scaling, softcap;  // softcap 0: none
    int32_t threads;
};

// A packed weight. scales: of each tile and group, TILE scales and then TILE offsets, in fp16 or fp32.
struct Weight {
    int64_t inputs, outputs, group, bits;
    const uint8_t *codes;
    const void *scales;
    int32_t half_scales;
    int32_t path;  // one of Path; a processor that lacks it must not be asked for it
};

// A packed weight in fp32 or bf16, for dense_matmul.cpp. numbers: [tiles, inputs, 16].
struct DenseWeight {
    int64_t inputs, outputs;
    const void *numbers;
    int32_t is_bf16, path;
};

struct Projection {
    const Weight *weight;
    const float *bias;
};

extern "C" void quantized_matmul_float32(float *out, const float *inputs, const float *bias, const Weight *weight,
                                         int64_t rows, int32_t threads);

extern "C" void dense_matmul_float32(float *out, const float *inputs, const float *bias, const DenseWeight *weight,
                                     int64_t rows, int32_t threads);
extern "C" void dense_matmul_bfloat16(bf16 *out, const bf16 *inputs, const bf16 *bias, const DenseWeight *weight,
                                      int64_t rows, int32_t threads);

// Steps of a pass as one thread's share of them; cpu_ops.cpp has them for the dtypes T of rows and K of the cache.

// Rotates queries in place, and writes rotated keys and values to the cells of some rows.
template <typename T, typename K>
void rotate_and_write_rows(team::Span rows, T *qkv, K *keys, K *values, const int64_t *cells, const float *cosine,
                           const float *sine, const T *q_norm, const T *k_norm, float eps, int64_t heads,
                           int64_t kv_heads, int64_t dim);

// What threads take one by one in attention: some rows of a sequence, and one key/value head.
struct AttentionTask {
    int64_t first, last, kv_head;
};

std::vector<AttentionTask> attention_tasks(const Rows &rows, const Heads &heads);

// Takes tasks until all are taken. next: the first that no thread has taken yet; 0 at first.
template <typename T, typename K>
void attend_tasks(const std::vector<AttentionTask> &tasks, std::atomic<int64_t> &next, const Rows &rows,
                  const Heads &heads, const T *query, const K *keys, const K *values, T *out, const float *sinks);

// The k likeliest of a row of logits, the likeliest first, ties to the lower index; with log_probs, their
// log-probabilities, all NaN if the row has a NaN.
void likeliest_of_row(int64_t *index, float *log_probs, const float *row, int64_t size, int64_t k);
