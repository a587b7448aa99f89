// The target's picks of rows of fp32 logits on a CPU: kernels/sample.py has the same for a GPU, sampling/sampler.py
// the reference. A row is read five times at most, and no vocabulary is sorted: scores are counted by their distance
// from the highest one, and only those where a cut falls are put in order. What the cuts keep is one interval in the
// order of (score, token id), so a `Floor` says it. Noise is computed where it could still win.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "cpu_ops.h"
#include "parallel.h"
#include "vectors.h"

namespace {

// The parameters of a batch's sequences.
struct Sampling {
    const float *temperature;
    const int64_t *top_k;
    const float *top_p, *min_p;
    const int64_t *seed;
};

constexpr int CHUNK = 64;  // tokens that are looked at together
constexpr float BINS_PER_UNIT = 32.0f;
constexpr int NUM_BINS = 1024;       // the last one has all that is 32 or more below the highest score
constexpr float MOST_NOISE = 22.9f;  // -log(-log1p(-2^-33)), rounded up
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

// Scores above `score` are kept, and of those equal to it the tokens from `token` on.
struct Floor {
    float score = -INFINITY;
    int64_t token = 0;

    bool keeps(float x, int64_t id) const { return x > score || (x == score && id >= token); }
};

inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// The uniform number of 32 bits, as in `gumbel_noise` of sampling/noise.py.
inline float uniform(uint32_t bits) { return std::min((bits + 0.5f) * 0x1p-32f, 1 - 0x1p-24f); }

inline float gumbel(float v) { return -std::log(-std::log1p(-v)); }

// One row's scores, and what is left of them after each cut.
class Row {
public:
    // scores: room for `size` numbers.
    Row(const float *logits, int64_t size, float temperature, float *scores) : scores_(scores), size_(size) {
        for (int64_t i = 0; i < size; i++)
            scores[i] = logits[i] / temperature;
        peak_ = largest(scores, size);
    }

    float peak() const { return peak_; }

    // Keep the k highest scores and their ties.
    void keep_top_k(int64_t k) {
        int64_t counts[NUM_BINS] = {};
        for_each_bin([&](int64_t, int bin, float) { counts[bin]++; });
        int bin = 0;
        for (; counts[bin] < k; bin++)
            k -= counts[bin];
        auto edge = members(bin);
        std::nth_element(edge.begin(), edge.begin() + (k - 1), edge.end(), std::greater<>());
        floor_ = {edge[k - 1].first, 0};
    }

    // Keep the likeliest of what is kept, until the rest has 1 - p of its probability at most; one token at least.
    void keep_top_p(float p) {
        double masses[NUM_BINS] = {}, total = 0, above = 0;
        for_each_bin([&](int64_t i, int bin, float mass) { masses[bin] += floor_.keeps(scores_[i], i) ? mass : 0.0f; });
        for (double mass : masses)
            total += mass;
        const double wanted = total - double(1 - p) * total;
        int bin = 0;
        for (; bin + 1 < NUM_BINS && above + masses[bin] < wanted; bin++)
            above += masses[bin];
        auto edge = members(bin);
        std::sort(edge.begin(), edge.end(), std::greater<>());
        for (auto [score, token] : edge) {
            if (above >= wanted && above > 0)
                break;
            floor_ = {score, token};
            above += exp_of(broadcast(score - peak_))[0];
        }
    }

    // Keep tokens at least min_p times as probable as the likeliest.
    void keep_min_p(float min_p) {
        float least = peak_ + std::log(min_p);
        if (least > floor_.score)
            floor_ = {least, 0};
    }

    // The kept token with the highest sum of score and noise; ties go to the lowest id.
    int64_t draw(uint64_t key) const {
        int64_t token = std::find(scores_, scores_ + size_, peak_) - scores_;
        while (!floor_.keeps(peak_, token))
            token = std::find(scores_ + token + 1, scores_ + size_, peak_) - scores_;
        float best = peak_ + gumbel(uniform(mixed(key + token * GOLDEN) >> 32));
        const float slack = std::fabs(peak_) * 0x1p-22f + 0x1p-20f;  // what sums of scores and noise are rounded by
        for (int64_t begin = 0; begin < size_; begin += CHUNK) {
            const int count = std::min<int64_t>(CHUNK, size_ - begin);
            if (largest(scores_ + begin, count) < std::max(floor_.score, best - MOST_NOISE - slack))
                continue;
            float noise[CHUNK], enough[CHUNK];
            for (int j = 0; j < count; j++)
                noise[j] = uniform(mixed(key + (begin + j) * GOLDEN) >> 32);
            for (int j = 0; j < count; j += LANES)  // noise of more than d takes a uniform number below e^-d
                store(enough + j, exp_of(load_upto(scores_ + begin + j, count - j) - best + slack) * 1.0001f);
            for (int j = 0; j < count; j++) {
                if (noise[j] > enough[j] || !floor_.keeps(scores_[begin + j], begin + j))
                    continue;
                const float sum = scores_[begin + j] + gumbel(noise[j]);
                if (sum > best || (sum == best && begin + j < token))
                    best = sum, token = begin + j;
            }
        }
        return token;
    }

private:
    static int bin_of(float gap) { return gap < NUM_BINS / BINS_PER_UNIT ? int(gap * BINS_PER_UNIT) : NUM_BINS - 1; }

    // Call `see` with each token, its bin and e^(score - peak).
    template <typename See> void for_each_bin(See see) const {
        float mass[CHUNK];
        for (int64_t begin = 0; begin < size_; begin += CHUNK) {
            const int count = std::min<int64_t>(CHUNK, size_ - begin);
            for (int j = 0; j < count; j += LANES)
                store(mass + j, exp_of(load_upto(scores_ + begin + j, count - j) - peak_));
            for (int j = 0; j < count; j++)
                see(begin + j, bin_of(peak_ - scores_[begin + j]), mass[j]);
        }
    }

    // The kept tokens of a bin, with their scores.
    std::vector<std::pair<float, int64_t>> members(int bin) const {
        std::vector<std::pair<float, int64_t>> found;
        for (int64_t i = 0; i < size_; i++)
            if (bin_of(peak_ - scores_[i]) == bin && floor_.keeps(scores_[i], i))
                found.push_back({scores_[i], i});
        return found;
    }

    const float *scores_;
    int64_t size_;
    float peak_;
    Floor floor_;
};

// The first NaN, else the first of the highest.
int64_t argmax(const float *logits, int64_t size) {
    const int64_t nan = first_nan(logits, size);
    return nan >= 0 ? nan : std::find(logits, logits + size, largest(logits, size)) - logits;
}

int64_t pick(const float *logits, int64_t size, const Sampling &sampling, int64_t i, int64_t position, float *scratch) {
    if (sampling.temperature[i] == 0)
        return argmax(logits, size);
    Row row(logits, size, sampling.temperature[i], scratch);
    if (!std::isfinite(row.peak()) || first_nan(scratch, size) >= 0)
        return argmax(scratch, size);
    if (sampling.top_k[i] > 0 && sampling.top_k[i] < size)
        row.keep_top_k(sampling.top_k[i]);
    if (sampling.top_p[i] < 1)
        row.keep_top_p(sampling.top_p[i]);
    if (sampling.min_p[i] > 0)
        row.keep_min_p(sampling.min_p[i]);
    return row.draw(mixed(mixed(sampling.seed[i]) + position));
}

}  // namespace

extern "C" void sample_rows_float32(int64_t *tokens, const float *logits, const float *temperature,
                                    const int64_t *top_k, const float *top_p, const float *min_p, const int64_t *seed,
                                    const int64_t *seq, const int64_t *positions, float *scratch, int64_t rows,
                                    int64_t size, int threads) {
    const Sampling sampling{temperature, top_k, top_p, min_p, seed};
    std::atomic<int64_t> next{0};  // rows take longer or shorter
    parallel(rows > 1 && rows * size > SMALL ? threads : 1, [&](const team::Member &member) {
        float *own = scratch + member.index * size;
        for (int64_t r = next++; r < rows; r = next++)
            tokens[r] = pick(logits + r * size, size, sampling, seq[r], positions[r], own);
    });
}
