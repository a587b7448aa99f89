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

// The rows of one pass over trees, as in tree/draft_tree.py; row_of: [batch, num_nodes].
struct PackedRows {
    int64_t rows;
    int64_t *tokens, *positions, *seq, *node, *row_of;
};

// Lays the valid nodes out as rows: a row for every node if there are as many, else the valid ones of one tree after
// another, and then padding.
extern "C" void pack_rows(const PackedRows *packed, const Trees *trees, const int64_t *lengths) {
    const PackedRows &to = *packed;
    const Trees &from = *trees;
    bool is_rectangle = to.rows == from.batch * from.num_nodes;
    int64_t next = 0;
    for (int64_t b = 0; b < from.batch; b++)
        for (int64_t i = 0; i < from.num_nodes; i++) {
            int64_t at = b * from.num_nodes + i;
            if (!is_rectangle && !from.valid[at]) {
                to.row_of[at] = to.rows - 1;
                continue;
            }
            int64_t row = is_rectangle ? at : next++;
            to.tokens[row] = from.tokens[at];
            to.positions[row] = lengths[b] + from.depths[at];
            to.seq[row] = from.valid[at] ? b : -1;
            to.node[row] = i;
            to.row_of[at] = row;
        }
    for (; !is_rectangle && next < to.rows; next++) {
        to.tokens[next] = to.positions[next] = to.node[next] = 0;
        to.seq[next] = -1;
    }
}

// What the rows of trees attend to, as in attention/cpu_attention.py. mask, depths: [rows, num_nodes].
struct TreeLayout {
    int64_t *cells, *slots, *ends, *positions, *position_depths;
    uint8_t *mask;
};

// table: [slots, table_width] blocks. Padding rows are stored at null_position of the first sequence's slot.
extern "C" void lay_out_rows(const TreeLayout *layout, const PackedRows *packed, const Trees *trees,
                             const int64_t *all_slots, const int64_t *lengths, const int64_t *table,
                             int64_t table_width, int64_t block_size, int64_t null_position) {
    const TreeLayout &to = *layout;
    const PackedRows &rows = *packed;
    const Trees &from = *trees;
    int64_t width = from.num_nodes;
    bool is_rectangle = rows.rows == from.batch * width;
    for (int64_t r = 0; r < rows.rows; r++) {
        int64_t b = is_rectangle ? r / width : std::max<int64_t>(rows.seq[r], 0), first = b * width;
        int64_t node = is_rectangle ? r % width : rows.node[r];
        bool is_real = rows.seq[r] >= 0;
        int64_t stored_in = all_slots[is_real ? b : 0], position = is_real ? lengths[b] + rows.node[r] : null_position;
        to.cells[r] = cell(table, table_width, block_size, stored_in, position);
        to.slots[r] = all_slots[b];
        to.ends[r] = lengths[b];
        to.positions[r] = lengths[b] + from.depths[first + node];
        memcpy(to.position_depths + r * width, from.depths + first, width * sizeof(int64_t));
        uint8_t *seen = to.mask + r * width;
        memset(seen, 0, width);
        for (int64_t i = node; i >= 0; i = from.parents[first + i])
            seen[i] = 1;
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

// A record of a step, as `step_record` of engine/step.py says: [num_accepted, tokens, drafted by depth, then two times
// [judged, accepted, units] by bin, sum of the tree]. A tree's sum is DraftTree.sums of tree/draft_tree.py.
extern "C" void record_trees(int64_t *record, int64_t width, const Trees *trees, const int64_t *num_accepted,
                             const int64_t *tokens, const int64_t *path, int64_t length, int64_t num_bins, float unit,
                             int64_t token_step) {
    int64_t num_nodes = trees->num_nodes;
    const int64_t *parents = trees->parents, *depths = trees->depths;
    const float *log_values = trees->log_values, *draft_log_probs = trees->draft_log_probs;
    const uint8_t *valid = trees->valid;
    std::vector<uint8_t> on_path(num_nodes);
    for (int64_t b = 0; b < trees->batch; b++) {
        int64_t first = b * num_nodes, *row = record + b * width, *by_depth = row + 1 + length;
        int64_t *counts = by_depth + length - 1;
        row[0] = num_accepted[b];
        std::copy(tokens + b * length, tokens + (b + 1) * length, row + 1);
        std::fill(by_depth, row + width, 0);
        std::fill(on_path.begin(), on_path.end(), 0);
        for (int64_t i = 0; i < num_nodes; i++)
            if (valid[first + i])
                row[width - 1] += (parents[first + i] + token_step * trees->tokens[first + i]) * (2 * i + 1);
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

// Candidates of a batch, the most valuable first, ties to the earlier tree and node: at most `most` of each tree. values:
// [batch, width] of nodes 1, 2, ...; totals[m] is what the m best are expected to yield.
extern "C" void best_candidates(float *best, int64_t *owners, int64_t *nodes, float *totals, const float *values,
                                int64_t batch, int64_t width, int64_t most) {
    struct Candidate {
        float value;
        int64_t owner, node;
    };
    auto is_better = [](const Candidate &a, const Candidate &b) { return a.value > b.value; };
    std::vector<Candidate> all, of_tree;
    for (int64_t b = 0; b < batch; b++) {
        of_tree.clear();
        for (int64_t i = 0; i < width; i++)
            of_tree.push_back({values[b * width + i], b, i + 1});
        if (most < width)
            std::stable_sort(of_tree.begin(), of_tree.end(), is_better);
        all.insert(all.end(), of_tree.begin(), of_tree.begin() + std::min(most, width));
    }
    std::stable_sort(all.begin(), all.end(), is_better);
    double total = 0.0;
    totals[0] = 0.0f;
    for (size_t i = 0; i < all.size(); i++) {
        best[i] = all[i].value;
        owners[i] = all[i].owner;
        nodes[i] = all[i].node;
        total += std::exp(all[i].value);
        totals[i + 1] = (float)total;
    }
}

// keep: [batch, num_nodes], the roots and the first `count` candidates that are there. sizes: kept nodes of each tree.
extern "C" void keep_candidates(uint8_t *keep, int64_t *sizes, const float *best, const int64_t *owners,
                                const int64_t *nodes, int64_t count, int64_t batch, int64_t num_nodes) {
    memset(keep, 0, batch * num_nodes);
    for (int64_t b = 0; b < batch; b++)
        keep[b * num_nodes] = sizes[b] = 1;
    for (int64_t i = 0; i < count && best[i] > -INFINITY; i++) {
        keep[owners[i] * num_nodes + nodes[i]] = 1;
        sizes[owners[i]]++;
    }
}
