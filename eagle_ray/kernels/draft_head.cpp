// A draft of an EAGLE-3 head with quantised weights, in fp32: a call runs the head over the unread pairs or over a frontier,
// another appends the ranked children. methods/eagle/quantized_draft.py loads it; a draft is what methods/eagle/
// draft_buffers.py says, whose `_append_nodes` is the reference of `append_level`.
//
// From Python, the products, norms and metadata of a level are 60 operations, which take longer than the head's weights.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "cpu_ops.h"

struct DraftHead {
    Projection fc, qkv, output, gate_up, down, lm_head;
    const float *embedding, *embedding_norm, *feature_norm, *post_norm, *last_norm;
    float embedding_eps, feature_eps, post_eps, last_eps;
    const float *cosine, *sine;  // [positions, key_dim / 2]
    int32_t norm_before_residual, norm_output;
    int64_t hidden_size, first_position;
    float *keys, *values;
    Heads heads;
};

// A batch of drafts: the buffers, and what one draft is made from.
struct Drafts {
    int64_t max_batch, max_width, num_nodes, num_words;  // sizes of the buffers
    int64_t *tokens, *parents;                           // [max_batch, num_nodes]
    float *log_values, *draft_log_probs;
    int64_t *frontier_nodes;  // [max_batch, max_width]
    float *frontier_values;
    int64_t *words;                          // [max_batch, max_width, num_words]
    int64_t *frontier_tokens, *parent_rows;  // [levels + 1, max_batch, max_width]
    int64_t *offered;                        // [levels, max_batch, max_width, children]
    float *scores;
    float *features;  // [levels, max_batch, max_width, hidden]

    const int64_t *table;  // blocks of each slot of the head's cache
    int64_t table_width, block_size;
    const int64_t *queue_tokens;  // [slots, window]: the unread pairs
    const float *queue_features;
    int64_t window;

    int64_t level, batch, width, children, num_ends;
    const int64_t *slots, *lengths, *first, *starts, *roots, *ends;
    const float *temperature, *calibration;  // calibration: [levels, kinds, 3], or null
};

namespace {

constexpr int64_t BITS = 64;
constexpr float LARGEST_LOGIT = 16.0f;  // as in methods/calibration.py
constexpr int64_t KINDS = 2;

// Rows of the head, of which those in `kept` go past its attention.
struct Pass {
    std::vector<int64_t> tokens, positions, cells, kept, slots, begin, end, trunk;
    std::vector<uint8_t> mask;
    int64_t columns = 0;
    std::vector<float> inputs, hidden, both, normed, qkv, query, cosine, sine, attended, delta, gate_up, activated;

    void clear() {
        for (auto *values : {&tokens, &positions, &cells, &kept, &slots, &begin, &end, &trunk})
            values->clear();
        mask.clear();
        columns = 0;
    }
};

void project(std::vector<float> &out, const float *inputs, const Projection &p, int64_t rows, int threads) {
    out.resize(rows * p.weight->outputs);
    quantized_matmul_awake(out.data(), inputs, p.bias, p.weight, rows, threads);
}

void add_row(Pass &pass, const Drafts &d, int64_t b, int64_t token, int64_t position, int64_t stored_at) {
    const int64_t *blocks = d.table + d.slots[b] * d.table_width;
    pass.tokens.push_back(token);
    pass.positions.push_back(position);
    pass.cells.push_back(blocks[stored_at / d.block_size] * d.block_size + stored_at % d.block_size);
}

void keep_last_row(Pass &pass, const Drafts &d, int64_t b, int64_t end) {
    pass.kept.push_back(pass.tokens.size() - 1);
    pass.slots.push_back(d.slots[b]);
    pass.begin.push_back(d.first[b]);
    pass.end.push_back(end);
    pass.trunk.push_back(end);
}

// The unread pairs, of which each sequence's last is kept: of the others, the cache takes keys and values.
void add_pairs(Pass &pass, const DraftHead &h, const Drafts &d) {
    int64_t size = h.fc.weight->inputs;
    pass.inputs.clear();
    for (int64_t b = 0; b < d.batch; b++) {
        for (int64_t position = d.starts[b]; position <= d.lengths[b]; position++) {
            int64_t at = d.slots[b] * d.window + position % d.window;
            const float *feature = d.queue_features + at * size;
            add_row(pass, d, b, d.queue_tokens[at], position, position);
            pass.inputs.insert(pass.inputs.end(), feature, feature + size);
        }
        keep_last_row(pass, d, b, d.lengths[b] + 1);
    }
    project(pass.hidden, pass.inputs.data(), h.fc, pass.tokens.size(), h.heads.threads);
}

// The frontier, each node behind the feature of its parent; it sees its ancestors among the frontiers so far.
void add_frontier(Pass &pass, const DraftHead &h, const Drafts &d) {
    pass.columns = d.level * d.width;
    pass.hidden.clear();
    for (int64_t b = 0; b < d.batch; b++)
        for (int64_t i = 0; i < d.width; i++) {
            int64_t at = (d.level * d.max_batch + b) * d.max_width + i, root = d.lengths[b] + 1;
            add_row(pass, d, b, d.frontier_tokens[at], root + d.level - 1, root + (d.level - 1) * d.width + i);
            keep_last_row(pass, d, b, root);
            const int64_t *words = d.words + (b * d.max_width + i) * d.num_words;
            for (int64_t j = 0; j < pass.columns; j++)
                pass.mask.push_back(words[j / BITS] >> (j % BITS) & 1);
            int64_t parent = ((d.level - 1) * d.max_batch + b) * d.max_width + d.parent_rows[at];
            const float *feature = d.features + parent * h.hidden_size;
            pass.hidden.insert(pass.hidden.end(), feature, feature + h.hidden_size);
        }
}

// Queries, keys and values of all rows, from the normed embedding and the normed feature; residuals of kept rows.
void attend_inputs(Pass &pass, const DraftHead &h) {
    int64_t rows = pass.tokens.size(), size = h.hidden_size, half = h.heads.key_dim / 2;
    pass.both.resize(rows * 2 * size);
    std::vector<float> embedding(size);
    for (int64_t r = 0; r < rows; r++) {
        float *both = pass.both.data() + r * 2 * size, *hidden = pass.hidden.data() + r * size;
        memcpy(embedding.data(), h.embedding + pass.tokens[r] * size, size * sizeof(float));
        add_rms_norm_float32(both, embedding.data(), nullptr, h.embedding_norm, 1, size, h.embedding_eps, 1);
        add_rms_norm_float32(both + size, hidden, nullptr, h.feature_norm, 1, size, h.feature_eps, 1);
        if (h.norm_before_residual)
            memcpy(hidden, both + size, size * sizeof(float));
    }
    project(pass.qkv, pass.both.data(), h.qkv, rows, h.heads.threads);
    pass.cosine.resize(rows * half);
    pass.sine.resize(rows * half);
    for (int64_t r = 0; r < rows; r++) {
        int64_t position = (pass.positions[r] - h.first_position) * half;
        memcpy(pass.cosine.data() + r * half, h.cosine + position, half * sizeof(float));
        memcpy(pass.sine.data() + r * half, h.sine + position, half * sizeof(float));
    }
    rotate_and_write_float32(pass.qkv.data(), h.keys, h.values, pass.cells.data(), pass.cosine.data(), pass.sine.data(),
                             nullptr, nullptr, 0.0f, rows, h.heads.heads, h.heads.kv_heads, h.heads.key_dim,
                             h.heads.threads);
}

// Moves the kept rows together.
void keep(std::vector<float> &values, const std::vector<int64_t> &kept, int64_t size) {
    for (size_t i = 0; i < kept.size(); i++)
        memmove(values.data() + i * size, values.data() + kept[i] * size, size * sizeof(float));
}

void attend_and_activate(Pass &pass, const DraftHead &h, const Drafts &d) {
    int64_t rows = pass.kept.size(), size = h.hidden_size;
    int threads = h.heads.threads;
    keep(pass.hidden, pass.kept, size);
    keep(pass.qkv, pass.kept, h.heads.row_stride);
    Rows seen = {rows,
                 pass.columns,
                 d.block_size,
                 d.table_width,
                 d.table,
                 pass.slots.data(),
                 pass.begin.data(),
                 pass.end.data(),
                 pass.trunk.data(),
                 pass.mask.data()};
    pass.attended.resize(rows * h.output.weight->inputs);
    attend_float32(&seen, &h.heads, pass.qkv.data(), h.keys, h.values, pass.attended.data(), nullptr);
    project(pass.delta, pass.attended.data(), h.output, rows, threads);
    pass.normed.resize(rows * size);
    add_rms_norm_float32(pass.normed.data(), pass.hidden.data(), pass.delta.data(), h.post_norm, rows, size, h.post_eps,
                         threads);
    project(pass.gate_up, pass.normed.data(), h.gate_up, rows, threads);
    int64_t inner = h.down.weight->inputs;
    pass.activated.resize(rows * inner);
    silu_mul_float32(pass.activated.data(), pass.gate_up.data(), rows, inner, threads);
    project(pass.delta, pass.activated.data(), h.down, rows, threads);
    add_rms_norm_float32(pass.normed.data(), pass.hidden.data(), pass.delta.data(), h.last_norm, rows, size, h.last_eps,
                         threads);
}

float calibrated(float log_prob, const float *parameters, bool is_first) {
    if (log_prob == -INFINITY)
        return log_prob;
    float x = std::min(log_prob, -1e-7f);
    float logit = std::min(std::max(x - std::log(-std::expm1(x)), -LARGEST_LOGIT), LARGEST_LOGIT);
    float mapped = parameters[0] * logit + parameters[1] + (is_first ? parameters[2] : 0.0f);
    return std::min(mapped, 0.0f) - std::log1p(std::exp(-std::fabs(mapped)));
}

// Chooses the best of a level's nodes as the next frontier, ties to the earlier one; ends of sequences come last.
void choose(const Drafts &d, int64_t b, int64_t start, int64_t count) {
    const int64_t *tokens = d.tokens + b * d.num_nodes + start, *ends = d.ends + b * d.num_ends;
    std::vector<float> values(d.log_values + b * d.num_nodes + start, d.log_values + b * d.num_nodes + start + count);
    for (int64_t i = 0; i < count; i++)
        if (std::find(ends, ends + d.num_ends, tokens[i]) != ends + d.num_ends)
            values[i] = -INFINITY;
    std::vector<int64_t> order(count), words(d.width * d.num_words, 0);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + d.width, order.end(),
                      [&](int64_t i, int64_t j) { return values[i] > values[j] || (values[i] == values[j] && i < j); });
    int64_t *seen = d.words + b * d.max_width * d.num_words,
            following = ((d.level + 1) * d.max_batch + b) * d.max_width;
    for (int64_t i = 0; i < d.width; i++) {
        int64_t parent = order[i] / d.children, position = d.level * d.width + i;
        d.frontier_values[b * d.max_width + i] = values[order[i]];
        d.frontier_nodes[b * d.max_width + i] = order[i] + start;
        d.frontier_tokens[following + i] = tokens[order[i]];
        d.parent_rows[following + i] = parent;
        for (int64_t w = 0; d.level && w < d.num_words; w++)
            words[i * d.num_words + w] = seen[parent * d.num_words + w];
        if (position / BITS < d.num_words)  // the last level's nodes have no position
            words[i * d.num_words + position / BITS] |= (int64_t)1 << (position % BITS);
    }
    memcpy(seen, words.data(), words.size() * sizeof(int64_t));
}

void start(const Drafts &d) {
    for (int64_t b = 0; b < d.batch; b++) {
        d.tokens[b * d.num_nodes] = d.roots[b];
        d.parents[b * d.num_nodes] = -1;
        d.log_values[b * d.num_nodes] = d.draft_log_probs[b * d.num_nodes] = 0.0f;
        d.frontier_nodes[b * d.max_width] = 0;
        d.frontier_values[b * d.max_width] = 0.0f;
    }
}

}  // namespace

// Runs the head over what gets children at this level: features of the level's parents, and their logits.
extern "C" void draft_head_pass(const DraftHead *head, const Drafts *drafts, float *logits) {
    thread_local Pass pass;
    const DraftHead &h = *head;
    const Drafts &d = *drafts;
    pass.clear();
    if (d.level == 0)
        add_pairs(pass, h, d);
    else
        add_frontier(pass, h, d);
    attend_inputs(pass, h);
    attend_and_activate(pass, h, d);
    int64_t rows = pass.kept.size(), num = rows / d.batch, size = h.hidden_size;
    const std::vector<float> &features = h.norm_output ? pass.normed : pass.hidden;
    for (int64_t b = 0; b < d.batch; b++)
        memcpy(d.features + (d.level * d.max_batch + b) * d.max_width * size, features.data() + b * num * size,
               num * size * sizeof(float));
    quantized_matmul_awake(logits, pass.normed.data(), h.lm_head.bias, h.lm_head.weight, rows, h.heads.threads);
}

// Adds a level's children: scores are before calibration, own the head's log-probabilities; NaN is padding.
extern "C" void append_level(const Drafts *drafts, const int64_t *tokens, const float *scores, const float *own) {
    const Drafts &d = *drafts;
    int64_t num = d.level ? d.width : 1, count = num * d.children;
    int64_t begin = d.level ? 1 + d.children + (d.level - 1) * d.width * d.children : 1;
    if (d.level == 0)
        start(d);
    for (int64_t b = 0; b < d.batch; b++) {
        int64_t at = (d.level * d.max_batch + b) * d.max_width * d.children, kind = d.temperature[b] > 0.0f;
        const float *parameters = d.calibration + (d.level * KINDS + kind) * 3;
        for (int64_t i = 0; i < count; i++) {
            int64_t parent = i / d.children, child = b * count + i, node = b * d.num_nodes + begin + i;
            float score = scores[child];
            d.offered[at + i] = tokens[child];
            d.scores[at + i] = score;
            if (d.calibration)
                score = calibrated(score, parameters, i % d.children == 0);
            float value = d.frontier_values[b * d.max_width + parent] + score;
            d.tokens[node] = tokens[child];
            d.parents[node] = d.frontier_nodes[b * d.max_width + parent];
            d.log_values[node] = value == value ? value : -INFINITY;
            d.draft_log_probs[node] = own[child] == own[child] ? own[child] : -INFINITY;
        }
        choose(d, b, begin, count);
    }
}
