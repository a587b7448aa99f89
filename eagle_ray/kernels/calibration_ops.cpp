// One update of a calibration by what a step's drafts offered: methods/calibration.py says what it computes and is the
// reference. By torch it is 60 operations over a few dozen numbers, which take as long as half a level of drafts.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

constexpr int64_t SIZE = 3;  // parameters of a level and kind: slope, offset, first child
constexpr float LARGEST_LOGIT = 16.0f;

}  // namespace

// What the nodes of a level were offered: [batch, width, children]. The frontier [batch, width] is null for the roots.
struct OfferedLevel {
    int64_t width;
    const int64_t *tokens, *frontier_tokens, *parent_rows;
    const float *scores;
};

// The fit: parameters [levels, kinds, SIZE], information [levels, kinds, SIZE, SIZE]; prior [kinds, n, n], n = levels * SIZE.
struct Fit {
    int64_t levels, kinds;
    float *parameters, *information;
    const float *prior, *low, *high;
    float memory, largest_step;
};

// The target's tokens [batch, length], of which the first num_accepted + 1 of each row are known, and each row's kind.
struct Samples {
    int64_t batch, length, children;
    const int64_t *tokens, *num_accepted, *kinds;
};

namespace {

float logit(float log_prob) {
    float x = std::min(log_prob, -1e-7f);
    return std::clamp(x - std::log(-std::expm1(x)), -LARGEST_LOGIT, LARGEST_LOGIT);
}

// Sums over the samples, by level and kind.
struct Sums {
    std::vector<double> gradient, fisher, picks;

    Sums(int64_t levels, int64_t kinds)
        : gradient(levels * kinds * SIZE), fisher(levels * kinds * SIZE * SIZE), picks(levels * kinds) {}

    // Adds the children of one node, of which the target's token may be one.
    void add(int64_t at, const float *parameters, const int64_t *tokens, const float *scores, int64_t children,
             int64_t picked) {
        picks[at] += 1.0;
        for (int64_t k = 0; k < children; k++) {
            if (scores[k] == -INFINITY)
                continue;
            double x[SIZE] = {logit(scores[k]), 1.0, k == 0 ? 1.0 : 0.0}, mapped = 0.0;
            for (int64_t i = 0; i < SIZE; i++)
                mapped += x[i] * parameters[at * SIZE + i];
            double p = 1.0 / (1.0 + std::exp(-mapped)), missed = (tokens[k] == picked) - p;
            for (int64_t i = 0; i < SIZE; i++) {
                gradient[at * SIZE + i] += missed * x[i];
                for (int64_t j = 0; j < SIZE; j++)
                    fisher[(at * SIZE + i) * SIZE + j] += p * (1.0 - p) * x[i] * x[j];
            }
        }
    }
};

// Follows the target's tokens through each row's tree.
void add_paths(Sums &sums, const Fit &fit, const OfferedLevel *levels, int64_t count, const Samples &samples) {
    for (int64_t b = 0; b < samples.batch; b++) {
        const int64_t *tokens = samples.tokens + b * samples.length;
        int64_t node = 0;
        for (int64_t l = 0; l < count && samples.num_accepted[b] >= l; l++) {
            const OfferedLevel &level = levels[l];
            if (l) {
                const int64_t *parents = level.parent_rows + b * level.width;
                const int64_t *drafted = level.frontier_tokens + b * level.width;
                int64_t parent = node;
                for (node = 0; node < level.width; node++)
                    if (parents[node] == parent && drafted[node] == tokens[l - 1])
                        break;
                if (node == level.width)
                    break;
            }
            int64_t first = (b * level.width + node) * samples.children;
            sums.add(l * fit.kinds + samples.kinds[b], fit.parameters, level.tokens + first, level.scores + first,
                     samples.children, tokens[l]);
        }
    }
}

// Solves matrix @ x = x in place by elimination with the largest pivots. Returns false if there is no solution.
bool solve(std::vector<double> &matrix, std::vector<double> &x) {
    int64_t n = x.size();
    for (int64_t column = 0; column < n; column++) {
        int64_t best = column;
        for (int64_t row = column + 1; row < n; row++)
            if (std::fabs(matrix[row * n + column]) > std::fabs(matrix[best * n + column]))
                best = row;
        double pivot = matrix[best * n + column];
        if (!std::isfinite(pivot) || pivot == 0.0)
            return false;
        std::swap_ranges(&matrix[column * n], &matrix[column * n] + n, &matrix[best * n]);
        std::swap(x[column], x[best]);
        for (int64_t row = column + 1; row < n; row++) {
            double factor = matrix[row * n + column] / pivot;
            for (int64_t i = column; i < n; i++)
                matrix[row * n + i] -= factor * matrix[column * n + i];
            x[row] -= factor * x[column];
        }
    }
    for (int64_t row = n - 1; row >= 0; row--) {
        for (int64_t i = row + 1; i < n; i++)
            x[row] -= matrix[row * n + i] * x[i];
        x[row] /= matrix[row * n + row];
    }
    return true;
}

// Takes a bounded Newton step of one kind's levels.
void take_step(const Fit &fit, const Sums &sums, int64_t kind) {
    int64_t n = fit.levels * SIZE;
    std::vector<double> matrix(fit.prior + kind * n * n, fit.prior + (kind + 1) * n * n), step(n);
    for (int64_t l = 0; l < fit.levels; l++)
        for (int64_t i = 0; i < SIZE; i++) {
            int64_t at = l * fit.kinds + kind;
            step[l * SIZE + i] = sums.gradient[at * SIZE + i];
            for (int64_t j = 0; j < SIZE; j++)
                matrix[(l * SIZE + i) * n + l * SIZE + j] += fit.information[(at * SIZE + i) * SIZE + j];
        }
    if (!solve(matrix, step))
        return;
    for (int64_t l = 0; l < fit.levels; l++)
        for (int64_t i = 0; i < SIZE; i++) {
            float &parameter = fit.parameters[(l * fit.kinds + kind) * SIZE + i];
            double moved = step[l * SIZE + i];
            moved = moved == moved ? std::clamp<double>(moved, -fit.largest_step, fit.largest_step) : 0.0;
            parameter = std::clamp<float>(parameter + moved, fit.low[i], fit.high[i]);
        }
}

}  // namespace

extern "C" void update_calibration(const Fit *fit, const OfferedLevel *levels, int64_t count, const Samples *samples) {
    const Fit &f = *fit;
    Sums sums(f.levels, f.kinds);
    add_paths(sums, f, levels, count, *samples);
    for (int64_t at = 0; at < count * f.kinds; at++)
        for (int64_t i = 0; i < SIZE * SIZE; i++) {
            float &known = f.information[at * SIZE * SIZE + i];
            known = known * std::max(1.0f - (float)sums.picks[at] / f.memory, 0.0f) +
                    (float)sums.fisher[at * SIZE * SIZE + i];
        }
    for (int64_t kind = 0; kind < f.kinds; kind++)
        take_step(f, sums, kind);
}
