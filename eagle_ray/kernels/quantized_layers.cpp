// All decoder layers of a Llama-shaped model with quantised weights in one call and one region of the team, in fp32: what
// models/decoder.py does layer by layer, to the same bits.
//
// Norms and activations round their rows for the product that follows, and products add to the sum of the layers, so
// that nothing is written and read again on the way. At one row, calls and regions of their own would take as long as a
// third of the weights.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "cpu_ops.h"
#include "layer_steps.h"
#include "parallel.h"

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

// The rows of a pass: where the cache stores them, their angles, their embeddings [hidden], which become the sum of all
// layers, and its norm [out]. tap_stride: numbers between two rows of a tap.
struct PassRows {
    int64_t rows, hidden_size, tap_stride;
    const int64_t *cells;
    const float *cosine, *sine;
    float *hidden, *out;
    const float *norm;
    float eps;
};

namespace {

// A pass's rows, and room for what a layer makes.
struct Scratch : PassRows {
    float *qkv, *attended, *gate_up;
};

// What a pass needs beside its rows, kept by the thread that begins it.
struct Room {
    RowBuffer rounded;
    std::vector<float> qkv, attended, gate_up;

    Scratch reserve(const PassRows &pass, const DecoderLayer &first) {
        int64_t widest = 0;
        for (const Projection *p : {&first.qkv, &first.output, &first.down})
            widest = std::max(widest, p->weight->inputs);
        rounded.reserve(pass.rows, widest);
        qkv.resize(pass.rows * first.qkv.weight->outputs);
        attended.resize(pass.rows * first.output.weight->inputs);
        gate_up.resize(pass.rows * first.gate_up.weight->outputs);
        return {pass, qkv.data(), attended.data(), gate_up.data()};
    }
};

template <typename K>
void attend(const team::Member &member, const Scratch &s, const Heads &h, const DecoderLayer &l,
            const std::vector<AttentionTask> &tasks, std::atomic<int64_t> &next) {
    K *keys = (K *)l.keys, *values = (K *)l.values;
    rotate_and_write_rows(member.share(s.rows), s.qkv, keys, values, s.cells, s.cosine, s.sine, l.q_norm, l.k_norm,
                          l.head_eps, h.heads, h.kv_heads, h.key_dim);
    member.barrier();
    attend_tasks<float, K>(tasks, next, *l.rows, h, s.qkv, keys, values, s.attended, nullptr);
    member.barrier();
}

void tap(const team::Member &member, const Scratch &s, float *to) {
    for (int64_t r : member.share(s.rows))
        memcpy(to + r * s.tap_stride, s.hidden + r * s.hidden_size, s.hidden_size * sizeof(float));
}

void run_layer(const Products &products, const Scratch &s, const Heads &h, const DecoderLayer &l,
               const std::vector<AttentionTask> &tasks, std::atomic<int64_t> &next) {
    const team::Member &member = products.member;
    if (l.tap)
        tap(member, s, l.tap);
    round_normed(member, s.hidden, s.rows, s.hidden_size, l.input_norm, l.input_eps, products.rounded(l.qkv));
    products.multiply(s.qkv, false, l.qkv, s.rows);
    if (l.has_bf16_cache)
        attend<bf16>(member, s, h, l, tasks, next);
    else
        attend<float>(member, s, h, l, tasks, next);
    finish_layer(products, l, s.attended, s.hidden, s.gate_up, s.rows, s.hidden_size);
}

}  // namespace

// Runs the layers, which are of one shape, and the norm behind them.
extern "C" void quantized_layers(const DecoderLayer *layers, int64_t count, const PassRows *pass, const Heads *heads) {
    thread_local Room of_thread;
    Room &room = of_thread;  // the caller's, not one of each member
    const Scratch scratch = room.reserve(*pass, *layers);
    // Layers differ in what rows see, and not in whose rows they are.
    const std::vector<AttentionTask> tasks = attention_tasks(*layers->rows, *heads);
    std::vector<std::atomic<int64_t>> next(count);  // of each layer
    parallel(heads->threads, [&](const team::Member &member) {
        for (int64_t i = 0; i < count; i++)
            run_layer({member, room.rounded}, scratch, *heads, layers[i], tasks, next[i]);
        for (int64_t r : member.share(pass->rows)) {
            int64_t size = pass->hidden_size;
            norm_row(pass->out + r * size, pass->hidden + r * size, pass->norm, size, pass->eps);
        }
    });
}
