// What a step on a CPU does with the trees of its sequences after the target's pass: tree_ops.py says what each function
// computes. By torch it is 60 operations over a few dozen numbers, a twentieth of a step of one sequence.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

int64_t cell(const int64_t *table, int64_t width, int64_t block_size, int64_t slot, int64_t position) {
    return table[slot * width + position / block_size] * block_size + position % block_size;
}

}  // namespace

// Trees of [batch, num_nodes], as in tree/draft_tree.py.
struct Trees {
    int64_t batch, num_nodes;
    int64_t *tokens, *parents, *depths;
    float *log_values, *draft_log_probs;
    uint8_t *valid;
};

extern "C" void select_nodes(const Trees *selected, const Trees *trees, const uint8_t *keep) {
    const Trees &to = *selected, &from = *trees;
    std::vector<int64_t> index_of(from.num_nodes);
    for (int64_t b = 0; b < from.batch; b++) {
        int64_t first = b * from.num_nodes, begin = b * to.num_nodes, count = 0;
        for (int64_t i = 0; i < from.num_nodes && count < to.num_nodes; i++) {
            if (!keep[first + i])
                continue;
            int64_t node = begin + count, parent = from.parents[first + i];
            to.tokens[node] = from.tokens[first + i];
            to.parents[node] = parent < 0 ? -1 : index_of[parent];
            to.depths[node] = from.depths[first + i];
            to.log_values[node] = from.log_values[first + i];
            to.draft_log_probs[node] = from.draft_log_probs[first + i];
            to.valid[node] = 1;
            index_of[i] = count++;
        }
        for (int64_t node = begin + count; node < begin + to.num_nodes; node++) {
            to.tokens[node] = to.depths[node] = to.valid[node] = 0;
            to.parents[node] = -1;
            to.log_values[node] = to.draft_log_probs[node] = -INFINITY;
        }
    }
}

extern "C" void ancestors(uint8_t *seen, const int64_t *parents, int64_t batch, int64_t num_nodes) {
    for (int64_t i = 0; i < batch * num_nodes; i++) {
        uint8_t *row = seen + i * num_nodes, *first = seen + i / num_nodes * num_nodes * num_nodes;
        if (parents[i] >= 0)
            memcpy(row, first + parents[i] * num_nodes, num_nodes);
        else
            memset(row, 0, num_nodes);
        row[i % num_nodes] = 1;
    }
}

extern "C" void walk_paths(int64_t *nodes, int64_t *num_accepted, int64_t *out, const int64_t *tokens,
                           const int64_t *parents, const int64_t *depths, const uint8_t *valid, const int64_t *row_of,
                           const int64_t *picks, int64_t batch, int64_t num_nodes, int64_t length) {
    std::vector<uint8_t> accepted(num_nodes);
    std::fill(nodes, nodes + batch * length, -1);
    for (int64_t b = 0; b < batch; b++) {
        int64_t first = b * num_nodes, *path = nodes + b * length, count = 0;
        for (int64_t i = 0; i < num_nodes; i++) {
            int64_t parent = std::max<int64_t>(parents[first + i], 0);
            bool is_sampled = i == 0 || (accepted[parent] && tokens[first + i] == picks[row_of[first + parent]]);
            accepted[i] = valid[first + i] && is_sampled;
            if (accepted[i] && depths[first + i] < length)
                path[depths[first + i]] = i;
            count += accepted[i];
        }
        num_accepted[b] = count - 1;
        for (int64_t j = 0; j < length; j++)
            out[b * length + j] = picks[row_of[first + std::max<int64_t>(path[j], 0)]];
    }
}

// numbers: [layers, indices] of row_bytes each. Nodes rise along a path, and node j of it is moved to place j <= its own.
extern "C" void move_rows(uint8_t *numbers, int64_t layers, int64_t layer_bytes, int64_t row_bytes,
                          const int64_t *table, int64_t table_width, int64_t block_size, const int64_t *slots,
                          const int64_t *lengths, const int64_t *nodes, int64_t batch, int64_t length) {
    for (int64_t b = 0; b < batch; b++)
        for (int64_t j = 1; j < length; j++) {
            int64_t node = nodes[b * length + j];
            if (node <= j)
                continue;
            int64_t from = cell(table, table_width, block_size, slots[b], lengths[b] + node) * row_bytes;
            int64_t to = cell(table, table_width, block_size, slots[b], lengths[b] + j) * row_bytes;
            for (int64_t layer = 0; layer < layers; layer++)
                memcpy(numbers + layer * layer_bytes + to, numbers + layer * layer_bytes + from, row_bytes);
        }
}

// tokens and features: [slots, window], of which position p of a slot is at p % window.
extern "C" void queue_path(int64_t *tokens, uint8_t *features, int64_t window, int64_t row_bytes, const int64_t *slots,
                           const int64_t *lengths, const int64_t *nodes, const int64_t *num_accepted,
                           const int64_t *sampled, const int64_t *row_of, const uint8_t *rows, int64_t batch,
                           int64_t num_nodes, int64_t length) {
    for (int64_t b = 0; b < batch; b++)
        for (int64_t j = 0; j <= num_accepted[b] && j < length; j++) {
            int64_t at = slots[b] * window + (lengths[b] + 1 + j) % window;
            int64_t row = row_of[b * num_nodes + std::max<int64_t>(nodes[b * length + j], 0)];
            tokens[at] = sampled[b * length + j];
            memcpy(features + at * row_bytes, rows + row * row_bytes, row_bytes);
        }
}

// Columns of a record from num_accepted on: [drafted by depth], then two times [judged, accepted, units] by bin.
extern "C" void count_nodes(int64_t *record, int64_t width, const int64_t *parents, const int64_t *depths,
                            const float *log_values, const float *draft_log_probs, const uint8_t *valid,
                            const int64_t *path, int64_t batch, int64_t num_nodes, int64_t length, int64_t num_bins,
                            float unit) {
    std::vector<uint8_t> on_path(num_nodes);
    for (int64_t b = 0; b < batch; b++) {
        int64_t first = b * num_nodes, *by_depth = record + b * width, *counts = by_depth + length - 1;
        std::fill(by_depth, by_depth + width, 0);
        std::fill(on_path.begin(), on_path.end(), 0);
        for (int64_t j = 0; j < length; j++)
            if (path[b * length + j] >= 0)
                on_path[path[b * length + j]] = 1;
        for (int64_t i = 0; i < num_nodes; i++) {
            int64_t node = first + i, parent = parents[node];
            if (parent < 0)
                continue;
            if (valid[node])
                by_depth[depths[node] - 1]++;
            if (!on_path[parent])
                continue;
            float calibrated = valid[node] ? std::exp(log_values[node] - log_values[first + parent]) : 0.0f;
            float drafted = std::exp(draft_log_probs[node]);
            for (int64_t kind = 0; kind < 2; kind++) {
                float confidence = kind ? calibrated : drafted;
                int64_t bin = std::clamp<int64_t>(confidence * num_bins, 0, num_bins - 1);
                int64_t *of_kind = counts + kind * 3 * num_bins + bin;
                of_kind[0]++;
                of_kind[num_bins] += on_path[i];
                of_kind[2 * num_bins] += (int64_t)std::nearbyint(confidence / unit);
            }
        }
    }
}
