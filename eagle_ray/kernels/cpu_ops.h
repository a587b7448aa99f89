// What the files of this library share: the structures that cpu_ops.py fills, and the functions of a decoder layer.

#pragma once

#include <cstdint>

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

struct Projection {
    const Weight *weight;
    const float *bias;
};

extern "C" {
void add_rms_norm_float32(float *out, float *residual, const float *delta, const float *weight, int64_t rows,
                          int64_t size, float eps, int threads);
void silu_mul_float32(float *out, const float *gate_up, int64_t rows, int64_t size, int threads);
void rotate_and_write_float32(float *qkv, float *keys, float *values, const int64_t *cells, const float *cosine,
                              const float *sine, const float *q_norm, const float *k_norm, float eps, int64_t rows,
                              int64_t heads, int64_t kv_heads, int64_t dim, int threads);
void rotate_and_write_float32_bfloat16(float *qkv, bf16 *keys, bf16 *values, const int64_t *cells, const float *cosine,
                                       const float *sine, const float *q_norm, const float *k_norm, float eps,
                                       int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int threads);
void attend_float32(const Rows *rows, const Heads *heads, const float *query, const float *keys, const float *values,
                    float *out, const float *sinks);
void attend_float32_bfloat16(const Rows *rows, const Heads *heads, const float *query, const bf16 *keys,
                             const bf16 *values, float *out, const float *sinks);
void quantized_matmul_float32(float *out, const float *inputs, const float *bias, const Weight *weight, int64_t rows,
                              int32_t threads);
// The same product, one of many of a call, between which the other threads spin.
void quantized_matmul_awake(float *out, const float *inputs, const float *bias, const Weight *weight, int64_t rows,
                            int32_t threads);
}
