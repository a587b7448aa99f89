// The draft trees of several drafters as one tree for each sequence, with the value of each node by who proposes it.
//
// tree/tree_merge.py and methods/combine/calibration.py say what is computed, and compute it in torch elsewhere.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "parallel.h"

// The structures below are those of cpu_ops.py.

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

namespace {

constexpr float LARGEST_LOGIT = 16.0f;
constexpr float LARGEST_LOG_PROB = -1e-7f;
constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int64_t SMALL = 1 << 12;  // nodes below which starting threads costs more than they save

inline float logit(float log_prob) {
    float p = std::min(log_prob, LARGEST_LOG_PROB);
    return std::clamp(p - std::log(-std::expm1(p)), -LARGEST_LOGIT, LARGEST_LOGIT);
}

inline float log_sigmoid(float x) { return std::min(x, 0.0f) - std::log1p(std::exp(-std::fabs(x))); }

// The nodes of one sequence, in the order in which the drafters' trees have them.
struct Nodes {
    std::vector<int64_t> tokens, parents, depths;
    std::vector<float> draft_log_probs, log_probs;  // log_probs: of each node by drafter
    std::vector<int32_t> table, own, first, place;
    uint64_t mask = 0;

    void reset(int64_t most, int64_t depth) {
        tokens.clear(), parents.clear(), depths.clear(), draft_log_probs.clear(), log_probs.clear();
        uint64_t size = 16;
        while (size < 2 * (uint64_t)most)
            size *= 2;
        table.assign(size, -1), mask = size - 1;
        first.assign(depth + 2, 0);
    }

    // The node with this token below this parent; a new one if there is none yet.
    int32_t find(int64_t parent, int64_t token, int64_t depth, float draft_log_prob, int64_t drafters) {
        uint64_t at = ((uint64_t)parent * 0x9E3779B97F4A7C15u + (uint64_t)token) * 0xC2B2AE3D27D4EB4Fu >> 20 & mask;
        for (; table[at] >= 0; at = (at + 1) & mask)
            if (tokens[table[at]] == token && parents[table[at]] == parent)
                return table[at];
        int32_t node = (int32_t)tokens.size();
        table[at] = node;
        tokens.push_back(token), parents.push_back(parent), depths.push_back(depth);
        draft_log_probs.push_back(draft_log_prob);
        log_probs.resize(log_probs.size() + drafters, NEVER);
        return node;
    }

    void add(const CandidateTree &tree, int64_t row, int64_t drafter, int64_t drafters) {
        int64_t begin = row * tree.nodes;
        own.assign(tree.nodes, -1);
        for (int64_t j = 0; j < tree.nodes; j++) {
            int64_t i = begin + j, parent = tree.parents[i];
            if (!tree.valid[i])
                continue;
            int64_t above = parent < 0 ? -1 : own[parent];
            own[j] = find(above, tree.tokens[i], tree.depths[i], tree.draft_log_probs[i], drafters);
            float given = parent < 0 ? 0.0f : tree.log_values[i] - tree.log_values[begin + parent];
            log_probs[own[j] * drafters + drafter] = given;
        }
    }

    // Where each node stands breadth-first.
    void order(int64_t depth) {
        for (int64_t each : depths)
            first[each + 1]++;
        for (int64_t d = 0; d <= depth; d++)
            first[d + 1] += first[d];
        place.resize(depths.size());
        for (size_t i = 0; i < depths.size(); i++)
            place[i] = first[depths[i]]++;
    }
};

// The log-probability of a node given its parent, by what the drafters say of it.
float blended(const float *log_probs, const float *weights, const uint8_t *proposes, int64_t drafters) {
    const float *alone = weights, *together = weights + drafters, *lacks = weights + 2 * drafters;
    int64_t offers = 0;
    for (int64_t a = 0; a < drafters; a++)
        offers += log_probs[a] > NEVER;
    const float *slopes = offers == 1 ? alone : together;
    float sum = weights[3 * drafters];
    for (int64_t a = 0; a < drafters; a++) {
        if (log_probs[a] > NEVER)
            sum += slopes[a] * logit(log_probs[a]);
        else if (proposes[a])
            sum += lacks[a];
    }
    return log_sigmoid(sum);
}

void write(const Nodes &nodes, int64_t row, const Blend &blend, const MergedTrees &out) {
    int64_t drafters = blend.drafters, count = (int64_t)nodes.tokens.size(), begin = row * out.nodes;
    uint8_t proposes[64] = {};
    for (int64_t i = 1; i < count; i++)
        for (int64_t a = 0; a < drafters; a++)
            proposes[a] |= nodes.log_probs[i * drafters + a] > NEVER;

    for (int64_t i = 0; i < count; i++) {  // parents come first
        int64_t at = begin + nodes.place[i], depth = nodes.depths[i];
        const float *log_probs = &nodes.log_probs[i * drafters];
        out.tokens[at] = nodes.tokens[i], out.depths[at] = depth, out.valid[at] = 1;
        out.draft_log_probs[at] = nodes.draft_log_probs[i];
        std::copy(log_probs, log_probs + drafters, out.log_probs + at * drafters);
        if (nodes.parents[i] < 0) {
            out.parents[at] = -1, out.log_values[at] = 0.0f;
            continue;
        }
        out.parents[at] = nodes.place[nodes.parents[i]];
        int64_t level = std::min(depth, blend.levels) - 1;
        const float *weights = blend.weights + (level * blend.num_sets + blend.sets[row]) * (3 * drafters + 1);
        float value = out.log_values[begin + out.parents[at]] + blended(log_probs, weights, proposes, drafters);
        out.log_values[at] = value;
        if (blend.left_out < 0 || log_probs[blend.left_out] == NEVER)
            out.by_depth[(depth - 1) * out.rows * out.nodes + at] = value;
    }
}

}  // namespace

extern "C" void merge_blended(const CandidateTree *trees, const Blend *blend, const MergedTrees *out, int threads) {
    std::vector<int64_t> sizes(out->rows);
    parallel(out->rows * out->nodes > SMALL ? threads : 1, [&](const team::Member &member) {
        thread_local Nodes nodes;
        for (int64_t row : member.share(out->rows)) {
            nodes.reset(out->nodes, out->max_depth);
            for (int64_t a = 0; a < blend->drafters; a++)
                if (trees[a].nodes)
                    nodes.add(trees[a], row, a, blend->drafters);
            nodes.order(out->max_depth);
            write(nodes, row, *blend, *out);
            sizes[row] = nodes.tokens.size();
        }
    });
    *out->largest = sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
}
