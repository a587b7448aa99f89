// All decoder layers of a Llama-shaped model with quantised weights in one call, in fp32: what models/decoder.py does layer
// by layer, by the same functions and so to the same bits. Between two calls from Python the other threads fall asleep;
// at one row, that and the calls themselves take as long as a third of the weights.

#include "cpu_ops.h"

// One layer. keys and values are of the layer, in fp32 or bf16.
struct DecoderLayer {
    Projection qkv, output, gate_up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    float input_eps, post_eps, head_eps;
    int32_t has_bf16_cache;
    void *keys, *values;
    const Rows *rows;
    float *tap;  // where the sum that the layer reads is copied to, or null
};

// Of R rows: the sum of the layers before [hidden], and room for what a layer makes.
struct Scratch {
    int64_t rows, hidden_size, inner_size;
    const int64_t *cells;
    const float *cosine, *sine;
    float *hidden, *normed, *qkv, *attended, *gate_up, *activated, *delta;
};

namespace {

void project(float *out, const float *inputs, const Projection &p, const Scratch &s, int threads) {
    quantized_matmul_awake(out, inputs, p.bias, p.weight, s.rows, threads);
}

template <typename K, typename Rotate, typename Attend>
void attend(const DecoderLayer &l, const Scratch &s, const Heads &h, Rotate rotate_and_write, Attend attend_rows) {
    rotate_and_write(s.qkv, (K *)l.keys, (K *)l.values, s.cells, s.cosine, s.sine, l.q_norm, l.k_norm, l.head_eps,
                     s.rows, h.heads, h.kv_heads, h.key_dim, h.threads);
    attend_rows(l.rows, &h, s.qkv, (const K *)l.keys, (const K *)l.values, s.attended, nullptr);
}

}  // namespace

// Runs the layers; delta is what the last one adds to hidden.
extern "C" void quantized_layers(const DecoderLayer *layers, int64_t count, const Scratch *scratch,
                                 const Heads *heads) {
    const Scratch &s = *scratch;
    int threads = heads->threads;
    for (const DecoderLayer *l = layers; l < layers + count; l++) {
        add_rms_norm_float32(s.normed, s.hidden, l == layers ? nullptr : s.delta, l->input_norm, s.rows, s.hidden_size,
                             l->input_eps, threads);
        for (int64_t i = 0; l->tap && i < s.rows * s.hidden_size; i++)
            l->tap[i] = s.hidden[i];
        project(s.qkv, s.normed, l->qkv, s, threads);
        if (l->has_bf16_cache)
            attend<bf16>(*l, s, *heads, rotate_and_write_float32_bfloat16, attend_float32_bfloat16);
        else
            attend<float>(*l, s, *heads, rotate_and_write_float32, attend_float32);
        project(s.delta, s.attended, l->output, s, threads);
        add_rms_norm_float32(s.normed, s.hidden, s.delta, l->post_norm, s.rows, s.hidden_size, l->post_eps, threads);
        project(s.gate_up, s.normed, l->gate_up, s, threads);
        silu_mul_float32(s.activated, s.gate_up, s.rows, s.inner_size, threads);
        project(s.delta, s.activated, l->down, s, threads);
    }
}
