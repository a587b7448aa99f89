// A draft of an EAGLE head with quantised weights, in fp32: one call drafts all levels. Or a call runs the head over the
// unread pairs or over a frontier, and another appends the children, which Python has ranked. methods/eagle/
// quantized_draft.py loads it; a draft is what methods/eagle/draft_buffers.py says, whose `_append_nodes` is the
// reference of `append_level`.
//
// From Python, the products, norms and metadata of a level are 60 operations, which take longer than the head's weights.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "cpu_ops.h"
#include "layer_steps.h"
#include "parallel.h"

// A head of EAGLE-3 reads normed embeddings and features in its attention. One of EAGLE-1 and 2 has no norms but post_norm
// (the others are null): fc reads the embedding and the feature of each row. q_norm and k_norm are null in most heads, and
// window is 0 in heads that see all positions.
struct DraftHead {
    Projection fc, qkv, output, gate_up, down, lm_head;
    const float *embedding, *embedding_norm, *feature_norm, *post_norm, *last_norm;
    float embedding_eps, feature_eps, post_eps, last_eps;
    const float *cosine, *sine;  // [positions, key_dim / 2]
    const float *q_norm, *k_norm;
    float head_eps;
    int32_t norm_before_residual, norm_output;
    int64_t hidden_size, first_position, window;
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

// When further levels do not pay: PriceRule of tree/expand.py, which says what the numbers mean.
struct PriceRule {
    int64_t num_depths, num_ranks;
    const double *children;  // [num_depths, num_ranks]
    double accuracy, level_price, row_price;
    int64_t num_more;
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
    std::vector<float> inputs, hidden, normed, qkv, cosine, sine, attended, gate_up;
    RowBuffer rounded;
    std::vector<float> logits, scores;  // and the ranked children of the kept rows, where a call drafts all levels
    std::vector<int64_t> children;

    void clear() {
        for (auto *values : {&tokens, &positions, &cells, &kept, &slots, &begin, &end, &trunk})
            values->clear();
        mask.clear();
        columns = 0;
    }
};

void add_row(Pass &pass, const Drafts &d, int64_t b, int64_t token, int64_t position, int64_t stored_at) {
    const int64_t *blocks = d.table + d.slots[b] * d.table_width;
    pass.tokens.push_back(token);
    pass.positions.push_back(position);
    pass.cells.push_back(blocks[stored_at / d.block_size] * d.block_size + stored_at % d.block_size);
}

// Keeps the last row, which sees the positions before `end` that its window has.
void keep_last_row(Pass &pass, const DraftHead &h, const Drafts &d, int64_t b, int64_t end) {
    int64_t begin = d.first[b];
    if (h.window)
        begin = std::min(std::max(begin, pass.positions.back() - h.window + 1), end);
    pass.kept.push_back(pass.tokens.size() - 1);
    pass.slots.push_back(d.slots[b]);
    pass.begin.push_back(begin);
    pass.end.push_back(end);
    pass.trunk.push_back(end);
}

bool is_eagle3(const DraftHead &h) { return h.feature_norm != nullptr; }

// Numbers of a queued feature.
int64_t feature_size(const DraftHead &h) { return is_eagle3(h) ? h.fc.weight->inputs : h.hidden_size; }

// Adds a row of fc's inputs: the feature, behind the token's embedding in EAGLE-1 and 2.
void add_input(Pass &pass, const DraftHead &h, int64_t token, const float *feature) {
    const float *embedding = h.embedding + token * h.hidden_size;
    if (!is_eagle3(h))
        pass.inputs.insert(pass.inputs.end(), embedding, embedding + h.hidden_size);
    pass.inputs.insert(pass.inputs.end(), feature, feature + feature_size(h));
}

// The unread pairs, of which each sequence's last is kept: of the others, the cache takes keys and values.
void add_pairs(Pass &pass, const DraftHead &h, const Drafts &d) {
    pass.inputs.clear();
    for (int64_t b = 0; b < d.batch; b++) {
        for (int64_t position = d.starts[b]; position <= d.lengths[b]; position++) {
            int64_t at = d.slots[b] * d.window + position % d.window;
            add_row(pass, d, b, d.queue_tokens[at], position, position);
            add_input(pass, h, d.queue_tokens[at], d.queue_features + at * feature_size(h));
        }
        keep_last_row(pass, h, d, b, d.lengths[b] + 1);
    }
}

// The frontier, each node behind the feature of its parent; it sees its ancestors among the frontiers so far.
void add_frontier(Pass &pass, const DraftHead &h, const Drafts &d) {
    pass.columns = d.level * d.width;
    pass.hidden.clear();
    pass.inputs.clear();
    for (int64_t b = 0; b < d.batch; b++)
        for (int64_t i = 0; i < d.width; i++) {
            int64_t at = (d.level * d.max_batch + b) * d.max_width + i, root = d.lengths[b] + 1;
            add_row(pass, d, b, d.frontier_tokens[at], root + d.level - 1, root + (d.level - 1) * d.width + i);
            keep_last_row(pass, h, d, b, root);
            const int64_t *words = d.words + (b * d.max_width + i) * d.num_words;
            for (int64_t j = 0; j < pass.columns; j++) {
                bool is_near = !h.window || d.level - 1 - j / d.width < h.window;
                pass.mask.push_back(is_near && (words[j / BITS] >> (j % BITS) & 1));
            }
            int64_t parent = ((d.level - 1) * d.max_batch + b) * d.max_width + d.parent_rows[at];
            const float *feature = d.features + parent * h.hidden_size;
            if (is_eagle3(h))
                pass.hidden.insert(pass.hidden.end(), feature, feature + h.hidden_size);
            else
                add_input(pass, h, d.frontier_tokens[at], feature);
        }
}

// Makes room for what a pass computes, and finds the angles of its rows.
void prepare(Pass &pass, const DraftHead &h) {
    int64_t rows = pass.tokens.size(), half = h.heads.key_dim / 2, widest = 0;
    for (const Projection *p : {&h.fc, &h.qkv, &h.output, &h.gate_up, &h.down, &h.lm_head})
        widest = std::max(widest, p->weight->inputs);
    pass.rounded.reserve(rows, widest);
    pass.hidden.resize(rows * h.hidden_size);
    pass.normed.resize(rows * h.hidden_size);
    pass.qkv.resize(rows * h.heads.row_stride);
    pass.attended.resize(rows * h.output.weight->inputs);
    pass.gate_up.resize(rows * h.gate_up.weight->outputs);
    pass.cosine.resize(rows * half);
    pass.sine.resize(rows * half);
    for (int64_t r = 0; r < rows; r++) {
        int64_t position = (pass.positions[r] - h.first_position) * half;
        memcpy(pass.cosine.data() + r * half, h.cosine + position, half * sizeof(float));
        memcpy(pass.sine.data() + r * half, h.sine + position, half * sizeof(float));
    }
}

Rows kept_rows(const Pass &pass, const Drafts &d) {
    return {(int64_t)pass.kept.size(), pass.columns,      d.block_size,    d.table_width,     d.table,
            pass.slots.data(),         pass.begin.data(), pass.end.data(), pass.trunk.data(), pass.mask.data()};
}

// What queries, keys and values are computed from: the normed embedding and the normed feature of each row, or what fc made
// of both.
void round_inputs(const team::Member &member, Pass &pass, const DraftHead &h) {
    int64_t rows = pass.tokens.size(), size = h.hidden_size;
    RoundedRows to = pass.rounded.rows_of(*h.qkv.weight);
    if (!is_eagle3(h))
        return round_rows(member, pass.hidden.data(), rows, to);
    thread_local std::vector<float> both;
    both.resize(2 * size);
    for (int64_t r : member.share(rows)) {
        float *feature = pass.hidden.data() + r * size;
        norm_row(both.data(), h.embedding + pass.tokens[r] * size, h.embedding_norm, size, h.embedding_eps);
        norm_row(both.data() + size, feature, h.feature_norm, size, h.feature_eps);
        if (h.norm_before_residual)
            memcpy(feature, both.data() + size, size * sizeof(float));
        round_row(to, r, both.data());
    }
}

// Moves the kept rows together.
void keep(std::vector<float> &values, const std::vector<int64_t> &kept, int64_t size) {
    for (size_t i = 0; i < kept.size(); i++)
        memmove(values.data() + i * size, values.data() + kept[i] * size, size * sizeof(float));
}

// The last norm, whose rows are features, too.
void round_features(const team::Member &member, Pass &pass, const DraftHead &h) {
    int64_t size = h.hidden_size;
    RoundedRows to = pass.rounded.rows_of(*h.lm_head.weight);
    if (!h.last_norm)
        return round_rows(member, pass.hidden.data(), pass.kept.size(), to);
    round_normed(member, pass.hidden.data(), pass.kept.size(), size, h.last_norm, h.last_eps, to, pass.normed.data());
}

void run_pass(const team::Member &member, Pass &pass, const DraftHead &h, const Rows &seen,
              const std::vector<AttentionTask> &tasks, std::atomic<int64_t> &next, float *logits) {
    int64_t rows = pass.tokens.size(), kept = pass.kept.size(), size = h.hidden_size;
    float *hidden = pass.hidden.data(), *qkv = pass.qkv.data();
    const Products products{member, pass.rounded};
    if (!pass.inputs.empty()) {
        round_rows(member, pass.inputs.data(), rows, products.rounded(h.fc));
        products.multiply(hidden, false, h.fc, rows);
    }
    round_inputs(member, pass, h);
    products.multiply(qkv, false, h.qkv, rows);

    rotate_and_write_rows<float, float>(member.share(rows), qkv, h.keys, h.values, pass.cells.data(),
                                        pass.cosine.data(), pass.sine.data(), h.q_norm, h.k_norm, h.head_eps,
                                        h.heads.heads, h.heads.kv_heads, h.heads.key_dim);
    member.barrier();
    if (member.index == 0) {
        keep(pass.hidden, pass.kept, size);
        keep(pass.qkv, pass.kept, h.heads.row_stride);
    }
    member.barrier();
    attend_tasks<float, float>(tasks, next, seen, h.heads, qkv, h.keys, h.values, pass.attended.data(), nullptr);
    member.barrier();
    finish_layer(products, h, pass.attended.data(), hidden, pass.gate_up.data(), kept, size);
    round_features(member, pass, h);
    products.multiply(logits, false, h.lm_head, kept);
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

// What ranks the children of a level: the tokens of the logits (null: all), and where the ranked ones go.
struct Ranking {
    const int64_t *token_ids;
    int64_t num_tokens, num_children;
    int64_t *tokens;
    float *scores;
};

// Ranks the children of the member's share of the rows; NaN, as overflowed heads give, is no child.
void rank(const team::Member &member, const Ranking &ranking, const float *logits, int64_t rows) {
    int64_t k = ranking.num_children;
    for (int64_t r : member.share(rows)) {
        int64_t *tokens = ranking.tokens + r * k;
        float *scores = ranking.scores + r * k;
        likeliest_of_row(tokens, scores, logits + r * ranking.num_tokens, ranking.num_tokens, k);
        for (int64_t i = 0; i < k; i++) {
            scores[i] = scores[i] == scores[i] ? scores[i] : -INFINITY;
            tokens[i] = ranking.token_ids ? ranking.token_ids[tokens[i]] : tokens[i];
        }
    }
}

// Runs the head over what gets children at this level: features of the level's parents, and their logits. With a ranking,
// their children, too.
void run_level(Pass &pass, const DraftHead &h, const Drafts &d, float *logits, const Ranking *ranking) {
    pass.clear();
    if (d.level == 0)
        add_pairs(pass, h, d);
    else
        add_frontier(pass, h, d);
    prepare(pass, h);
    const Rows seen = kept_rows(pass, d);
    const std::vector<AttentionTask> tasks = attention_tasks(seen, h.heads);
    std::atomic<int64_t> next{0};
    int64_t rows = pass.kept.size(), num = rows / d.batch, size = h.hidden_size;
    parallel(h.heads.threads, [&](const team::Member &member) {
        run_pass(member, pass, h, seen, tasks, next, logits);
        if (ranking)
            rank(member, *ranking, logits, rows);
    });

    const std::vector<float> &features = h.norm_output ? pass.normed : pass.hidden;
    for (int64_t b = 0; b < d.batch; b++)
        memcpy(d.features + (d.level * d.max_batch + b) * d.max_width * size, features.data() + b * num * size,
               num * size * sizeof(float));
}

// Adds a level's children: scores are before calibration, own the head's log-probabilities; NaN is padding.
void add_level(const Drafts &d, const int64_t *tokens, const float *scores, const float *own) {
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

// Whether one more level is expected to yield more than it costs, by the frontier below `depth` levels.
bool pays(const PriceRule &rule, const Drafts &d, int64_t depth) {
    const double *children = rule.children + std::min(depth, rule.num_depths - 1) * rule.num_ranks;
    double gain = 0.0;
    for (int64_t i = 0; i < d.batch * d.width; i++) {
        double value =
            unfused(rule.accuracy * std::exp((double)d.frontier_values[i / d.width * d.max_width + i % d.width]));
        for (int64_t j = 0; j < rule.num_ranks; j++) {
            double more = unfused(value * children[j]) - rule.row_price;
            if (more <= 0)
                break;
            gain += more;
        }
        if (gain > rule.level_price)
            return true;
    }
    return false;
}

}  // namespace

extern "C" void draft_head_pass(const DraftHead *head, const Drafts *drafts, float *logits) {
    thread_local Pass of_thread;
    run_level(of_thread, *head, *drafts, logits, nullptr);
}

extern "C" void append_level(const Drafts *drafts, const int64_t *tokens, const float *scores, const float *own) {
    add_level(*drafts, tokens, scores, own);
}

// Drafts up to max_depth levels, whose number is drafts->level then. The head's likeliest children are offered: token_ids
// are their tokens (null: all of the vocabulary). rule: null is the full depth.
extern "C" void draft_levels(const DraftHead *head, Drafts *drafts, const int64_t *token_ids, const PriceRule *rule,
                             int64_t max_depth) {
    thread_local Pass of_thread;
    Pass &pass = of_thread;  // the caller's, not one of each member
    Drafts &d = *drafts;
    int64_t num_tokens = head->lm_head.weight->outputs, most = d.batch * d.width, num_unpaid = 0;
    pass.logits.resize(most * num_tokens);
    pass.scores.resize(most * d.children);
    pass.children.resize(most * d.children);
    const Ranking ranking{token_ids, num_tokens, d.children, pass.children.data(), pass.scores.data()};
    for (d.level = 0; d.level < max_depth; d.level++) {
        if (rule && d.level) {
            num_unpaid += num_unpaid > 0 || !pays(*rule, d, d.level);
            if (num_unpaid > rule->num_more)
                break;
        }
        run_level(pass, *head, d, pass.logits.data(), &ranking);
        add_level(d, ranking.tokens, ranking.scores, ranking.scores);
    }
}
