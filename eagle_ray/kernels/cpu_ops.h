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

// The trees of one drafter, [rows, nodes]; no nodes: it did not draft.
struct CandidateTree {
    int64_t nodes;
    const int64_t *tokens, *parents, *depths;
    const float *log_values, *draft_log_probs;
    const uint8_t *valid;
};

// The weights of an EnsembleCalibration, [levels, num_sets, 3 * drafters + 1], and the set of each row.
struct Blend {
    int64_t drafters, levels, num_sets;
    int64_t left_out;  // the drafter whose nodes are not among those by depth; -1: none
    const float *weights;
    const int64_t *sets;
};

// What merge_blended returns: trees [rows, nodes], filled with padding before; log_probs [rows, nodes, drafters];
// by_depth [max_depth, rows, nodes]. largest: the nodes of the largest tree.
struct MergedTrees {
    int64_t rows, nodes, max_depth;
    int64_t *tokens, *parents, *depths;
    float *log_values, *draft_log_probs;
    uint8_t *valid;
    float *log_probs, *by_depth;
    int64_t *largest;
};

extern "C" {
void merge_blended(const CandidateTree *trees, const Blend *blend, const MergedTrees *out, int threads);
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
}
