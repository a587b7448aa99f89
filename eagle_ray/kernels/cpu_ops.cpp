// The small operations of a decoder layer on a CPU, in fp32 and bf16: norms, rotary embedding, activation, attention; and
// the likeliest tokens of logits.
//
// cpu_ops.py loads this file's library and says what each function computes; torch does the matrix products. Vectors are
// GCC's vector extensions, so one source serves AVX-512, AVX2 and NEON. All sums are in fp32 and in an order that
// depends on the row alone, never on the other rows of the pass: a row's result is the same bits in any batch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_ops.h"
#include "vectors.h"

namespace {

constexpr int BLOCK = 4;           // queries that read a key together
constexpr int ROWS_PER_TASK = 16;  // rows of one sequence that a thread takes at once

// --- norms and activation -------------------------------------------------------------------------------------------

template <typename T> float inverse_rms(const T *row, int64_t size, float eps) {
    Floats squares = {};
    for (int64_t i = 0; i < size; i += LANES) {
        Floats x = load_upto(row + i, size - i);
        squares += x * x;
    }
    return 1.0f / std::sqrt(sum(squares) / size + eps);
}

template <typename T> void norm_row(T *out, const T *row, const T *weight, int64_t size, float eps) {
    float scale = inverse_rms(row, size, eps);
    for (int64_t i = 0; i < size; i += LANES) {
        Floats x = rounded(load_upto(row + i, size - i) * scale, row);
        store_upto(out + i, x * load_upto(weight + i, size - i), size - i);
    }
}

template <typename T> void add_row(T *row, const T *delta, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES)
        store_upto(row + i, load_upto(row + i, size - i) + load_upto(delta + i, size - i), size - i);
}

template <typename T>
void add_rms_norm(T *out, T *residual, const T *delta, const T *weight, int64_t rows, int64_t size, float eps,
                  int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        if (delta)
            add_row(residual + r * size, delta + r * size, size);
        norm_row(out + r * size, residual + r * size, weight, size, eps);
    }
}

template <typename T> void silu_mul(T *out, const T *gate_up, int64_t rows, int64_t size, int threads) {
    constexpr int64_t CHUNK = 512;
    int64_t chunks = (size + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t task = 0; task < rows * chunks; task++) {
        int64_t r = task / chunks, begin = task % chunks * CHUNK, end = std::min(size, begin + CHUNK);
        const T *gate = gate_up + r * 2 * size, *up = gate + size;
        for (int64_t i = begin; i < end; i += LANES) {
            Floats g = load_upto(gate + i, end - i);
            Floats activated = rounded(g / (1.0f + exp_of(-g)), gate);
            store_upto(out + r * size + i, activated * load_upto(up + i, end - i), end - i);
        }
    }
}

// --- rotary embedding -----------------------------------------------------------------------------------------------

// Rotates pairs (i, i + half) of one head. to may be from.
template <typename T, typename K>
void rotate(K *to, const T *from, const float *cosine, const float *sine, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t left = half - i;
        Floats a = load_upto(from + i, left), b = load_upto(from + half + i, left);
        Floats c = load_upto(cosine + i, left), s = load_upto(sine + i, left);
        store_upto(to + i, a * c - b * s, left);
        store_upto(to + half + i, b * c + a * s, left);
    }
}

template <typename T, typename K>
void rotate_and_write(T *qkv, K *keys, K *values, const int64_t *cells, const float *cosine, const float *sine,
                      const T *q_norm, const T *k_norm, float eps, int64_t rows, int64_t heads, int64_t kv_heads,
                      int64_t dim, int threads) {
    int64_t width = (heads + 2 * kv_heads) * dim, half = dim / 2;
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const float *c = cosine + r * half, *s = sine + r * half;
        T *q = qkv + r * width, *k = q + heads * dim, *v = k + kv_heads * dim;
        for (int64_t h = 0; h < heads; h++) {
            if (q_norm)
                norm_row(q + h * dim, q + h * dim, q_norm, dim, eps);
            rotate(q + h * dim, q + h * dim, c, s, half);
        }
        K *key = keys + cells[r] * kv_heads * dim, *value = values + cells[r] * kv_heads * dim;
        for (int64_t h = 0; h < kv_heads; h++) {
            if (k_norm)
                norm_row(k + h * dim, k + h * dim, k_norm, dim, eps);
            rotate(key + h * dim, k + h * dim, c, s, half);
        }
        for (int64_t i = 0; i < kv_heads * dim; i += LANES)
            store_upto(value + i, load_upto(v + i, kv_heads * dim - i), kv_heads * dim - i);
    }
}

// --- attention ------------------------------------------------------------------------------------------------------

struct Task {
    int64_t first, last, kv_head;
};

// Scratch of one thread, for BLOCK queries.
struct Scratch {
    std::vector<float> queries, scores, sums;
    std::vector<int64_t> tail;
    int64_t key_size, value_size, num_scores;

    void reserve(int64_t key_dim, int64_t value_dim, int64_t columns) {
        key_size = (key_dim + LANES - 1) / LANES * LANES;
        value_size = (value_dim + LANES - 1) / LANES * LANES;
        num_scores = (columns + LANES - 1) / LANES * LANES;
        queries.assign(BLOCK * key_size, 0.0f);
        sums.assign(BLOCK * value_size, 0.0f);
        if ((int64_t)scores.size() < BLOCK * num_scores)
            scores.resize(BLOCK * num_scores);
    }
};

template <typename T, typename K> struct Attention {  // of one pass and layer: T of queries, K of the cache
    const Rows &rows;
    const Heads &heads;
    const T *query;
    const K *keys, *values;
    T *out;
    const float *sinks;

    int64_t cell(int64_t slot, int64_t column) const {
        const int64_t *blocks = rows.table + slot * rows.table_width;
        return blocks[column / rows.block_size] * rows.block_size + column % rows.block_size;
    }
    const K *key(int64_t cell, int64_t head) const { return keys + (cell * heads.kv_heads + head) * heads.key_dim; }
    const K *value(int64_t cell, int64_t head) const {
        return values + (cell * heads.kv_heads + head) * heads.value_dim;
    }

    float dot(const float *q, const K *k) const {
        Floats total = {};
        int64_t i = 0;
        for (; i + LANES <= heads.key_dim; i += LANES)
            total += load(q + i) * load(k + i);
        if (i < heads.key_dim)
            total += load(q + i) * load_some(k + i, heads.key_dim - i);
        return sum(total);
    }

    // BLOCK queries against KEYS keys that lie `step` numbers apart, each summed as `dot` sums: scores[j][m] of query j
    // and key m.
    template <int KEYS> void dots(const Scratch &s, const K *k, int64_t step, float *const *scores) const {
        Floats total[BLOCK][KEYS] = {};
        for (int64_t i = 0; i < heads.key_dim; i += LANES) {
            Floats x[KEYS];
            for (int m = 0; m < KEYS; m++)
                x[m] = load_upto(k + m * step + i, heads.key_dim - i);
            for (int j = 0; j < BLOCK; j++) {
                Floats y = load(s.queries.data() + j * s.key_size + i);
                for (int m = 0; m < KEYS; m++)
                    total[j][m] += y * x[m];
            }
        }
        for (int j = 0; j < BLOCK; j++)
            if constexpr (KEYS == 4) {
                Floats4 found = sums(total[j]);
                memcpy(scores[j], &found, sizeof(found));
            } else {
                for (int m = 0; m < KEYS; m++)
                    scores[j][m] = sum(total[j][m]);
            }
    }

    // Scores of BLOCK queries for columns [from, to) of a slot.
    void score_common(Scratch &s, int64_t slot, int64_t head, int64_t from, int64_t to, const int64_t *offset) const {
        int64_t step = heads.kv_heads * heads.key_dim;
        float *scores[BLOCK];
        for (int j = 0; j < BLOCK; j++)
            scores[j] = s.scores.data() + j * s.num_scores + from - offset[j];
        for (int64_t column = from; column < to;) {
            int64_t stop = std::min(to, (column / rows.block_size + 1) * rows.block_size);
            const K *k = key(cell(slot, column), head);
            while (column < stop) {
                int num_keys = stop - column >= 4 ? 4 : 1;
                if (num_keys == 4)
                    dots<4>(s, k, step, scores);
                else
                    dots<1>(s, k, step, scores);
                column += num_keys;
                k += num_keys * step;
                for (int j = 0; j < BLOCK; j++)
                    scores[j] += num_keys;
            }
        }
    }

    void add_value(float *sums, float weight, const K *v) const {
        for (int64_t i = 0; i < heads.value_dim; i += LANES)
            store(sums + i, load(sums + i) + weight * load_upto(v + i, heads.value_dim - i));
    }

    // Adds the values of columns [from, to) to the sums of BLOCK queries, WIDE vectors of each at a time.
    template <int WIDE>
    void add_values(Scratch &s, const float *scores, int64_t slot, int64_t head, int64_t from, int64_t to, int64_t i,
                    const int64_t *offset) const {
        Floats total[BLOCK][WIDE];
        for (int j = 0; j < BLOCK; j++)
            for (int w = 0; w < WIDE; w++)
                total[j][w] = load(s.sums.data() + j * s.value_size + i + w * LANES);
        for (int64_t column = from; column < to;) {
            int64_t stop = std::min(to, (column / rows.block_size + 1) * rows.block_size);
            const K *v = value(cell(slot, column), head) + i;
            for (; column < stop; column++, v += heads.kv_heads * heads.value_dim)
                for (int w = 0; w < WIDE; w++) {
                    Floats x = load(v + w * LANES);
                    for (int j = 0; j < BLOCK; j++)
                        total[j][w] += scores[j * s.num_scores + column - offset[j]] * x;
                }
        }
        for (int j = 0; j < BLOCK; j++)
            for (int w = 0; w < WIDE; w++)
                store(s.sums.data() + j * s.value_size + i + w * LANES, total[j][w]);
    }

    // Turns scores into weights whose sum is returned.
    float softmax(float *scores, int64_t count, float sink, bool has_sink) const {
        if (heads.softcap)
            for (int64_t i = 0; i < count; i++)
                scores[i] = std::tanh(scores[i] * heads.scaling / heads.softcap) * heads.softcap;
        else
            for (int64_t i = 0; i < count; i += LANES)
                store(scores + i, load(scores + i) * heads.scaling);
        float most = std::max(largest(scores, count), has_sink ? sink : -INFINITY);
        Floats total = {};
        for (int64_t i = 0; i < count; i += LANES) {
            Floats weight = exp_of(load(scores + i) - most);
            store(scores + i, weight);
            if (count - i < LANES)
                weight = load_some(scores + i, count - i);
            total += weight;
        }
        return sum(total) + (has_sink ? std::exp(sink - most) : 0.0f);
    }

    // Up to BLOCK queries (row, head of the group) of one sequence and one key/value head.
    void attend(Scratch &s, int64_t first_query, int64_t count, int64_t row0, int64_t head) const {
        int64_t group = heads.heads / heads.kv_heads, row[BLOCK], offset[BLOCK], visible[BLOCK];
        int64_t common_begin = 0, common_end = INT64_MAX, most = 0, slot = rows.slots[row0];
        for (int j = 0; j < BLOCK; j++) {
            int64_t q = first_query + std::min<int64_t>(j, count - 1);  // a short block repeats its last query
            row[j] = row0 + q / group;
            offset[j] = rows.begin[row[j]];
            common_begin = std::max(common_begin, rows.begin[row[j]]);
            common_end = std::min(common_end, rows.end[row[j]]);
            most = std::max(most, rows.end[row[j]] - rows.begin[row[j]] + rows.columns);
        }
        common_end = std::max(common_end, common_begin);
        s.reserve(heads.key_dim, heads.value_dim, most);
        for (int j = 0; j < BLOCK; j++) {
            int64_t q = first_query + std::min<int64_t>(j, count - 1);
            const T *from = query + row[j] * heads.row_stride + (head * group + q % group) * heads.head_stride;
            for (int64_t i = 0; i < heads.key_dim; i += LANES)
                store(s.queries.data() + j * s.key_size + i, load_upto(from + i, heads.key_dim - i));
        }
        score_common(s, slot, head, common_begin, common_end, offset);
        float weight_sums[BLOCK];
        for (int j = 0; j < count; j++) {
            float *scores = s.scores.data() + j * s.num_scores, *q = s.queries.data() + j * s.key_size;
            int64_t r = row[j], begin = rows.begin[r], end = rows.end[r];
            for (int64_t c = begin; c < std::min(common_begin, end); c++)
                scores[c - begin] = dot(q, key(cell(slot, c), head));
            for (int64_t c = std::max(common_end, begin); c < end; c++)
                scores[c - begin] = dot(q, key(cell(slot, c), head));
            int64_t n = std::max<int64_t>(end - begin, 0);
            for (int64_t c = 0; c < rows.columns; c++)
                if (rows.mask[r * rows.columns + c])
                    scores[n++] = dot(q, key(cell(slot, rows.trunk[r] + c), head));
            visible[j] = n;
            float sink = sinks ? sinks[head * group + (first_query + j) % group] : 0.0f;
            weight_sums[j] = softmax(scores, n, sink, sinks != nullptr);
        }
        for (int j = 0; j < count; j++)
            add_alone(s, j, row[j], slot, head, rows.begin[row[j]], std::min(common_begin, rows.end[row[j]]));
        add_common(s, slot, head, common_begin, common_end, offset);
        for (int j = 0; j < count; j++) {
            int64_t r = row[j];
            add_alone(s, j, r, slot, head, std::max(common_end, rows.begin[r]), rows.end[r]);
            add_tree(s, j, r, slot, head);
            T *to = out + (r * heads.heads + head * group + (first_query + j) % group) * heads.value_dim;
            float scale = visible[j] ? 1.0f / weight_sums[j] : 0.0f;
            for (int64_t i = 0; i < heads.value_dim; i += LANES)
                store_upto(to + i, load(s.sums.data() + j * s.value_size + i) * scale, heads.value_dim - i);
        }
    }

    void add_common(Scratch &s, int64_t slot, int64_t head, int64_t from, int64_t to, const int64_t *offset) const {
        int64_t i = 0;
        for (; i + 4 * LANES <= heads.value_dim; i += 4 * LANES)
            add_values<4>(s, s.scores.data(), slot, head, from, to, i, offset);
        for (; i + LANES <= heads.value_dim; i += LANES)
            add_values<1>(s, s.scores.data(), slot, head, from, to, i, offset);
        for (int j = 0; i < heads.value_dim && j < BLOCK; j++)
            for (int64_t c = from; c < to; c++) {
                Floats x = load_some(value(cell(slot, c), head) + i, heads.value_dim - i);
                float *at = s.sums.data() + j * s.value_size + i;
                store(at, load(at) + s.scores[j * s.num_scores + c - offset[j]] * x);
            }
    }

    void add_alone(Scratch &s, int j, int64_t r, int64_t slot, int64_t head, int64_t from, int64_t to) const {
        for (int64_t c = from; c < to; c++)
            add_value(s.sums.data() + j * s.value_size, s.scores[j * s.num_scores + c - rows.begin[r]],
                      value(cell(slot, c), head));
    }

    void add_tree(Scratch &s, int j, int64_t r, int64_t slot, int64_t head) const {
        int64_t n = std::max<int64_t>(rows.end[r] - rows.begin[r], 0);
        for (int64_t c = 0; c < rows.columns; c++)
            if (rows.mask[r * rows.columns + c])
                add_value(s.sums.data() + j * s.value_size, s.scores[j * s.num_scores + n++],
                          value(cell(slot, rows.trunk[r] + c), head));
    }
};

template <typename T, typename K>
void attend(const Rows &rows, const Heads &heads, const T *query, const K *keys, const K *values, T *out,
            const float *sinks) {
    std::vector<Task> tasks;
    for (int64_t first = 0, last; first < rows.rows; first = last) {
        for (last = first + 1; last < rows.rows && last < first + ROWS_PER_TASK; last++)
            if (rows.slots[last] != rows.slots[first])
                break;
        for (int64_t head = 0; head < heads.kv_heads; head++)
            tasks.push_back({first, last, head});
    }
    Attention<T, K> attention{rows, heads, query, keys, values, out, sinks};
    int64_t group = heads.heads / heads.kv_heads, num_tasks = tasks.size();
#pragma omp parallel num_threads(heads.threads) if (num_tasks > 1)
    {
        thread_local Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < num_tasks; t++) {
            int64_t queries = (tasks[t].last - tasks[t].first) * group;
            for (int64_t q = 0; q < queries; q += BLOCK)
                attention.attend(scratch, q, std::min<int64_t>(BLOCK, queries - q), tasks[t].first, tasks[t].kv_head);
        }
    }
}

// --- likeliest tokens -----------------------------------------------------------------------------------------------

// The k highest of a row, highest first, ties to the lower index: at index[0 .. k).
void highest(const float *row, int64_t size, int64_t k, int64_t *index) {
    constexpr int64_t CHUNK = 16 * LANES;
    int64_t found = 0;
    for (int64_t begin = 0; begin < size; begin += CHUNK) {
        int64_t end = std::min(begin + CHUNK, size);
        if (found == k && !(largest(row + begin, end - begin) > row[index[k - 1]]))
            continue;
        for (int64_t i = begin; i < end; i++) {
            if (found == k && !(row[i] > row[index[k - 1]]))
                continue;
            int64_t at = found < k ? found++ : k - 1;
            for (; at > 0 && row[i] > row[index[at - 1]]; at--)
                index[at] = index[at - 1];
            index[at] = i;
        }
    }
}

float log_sum_exp(const float *row, int64_t size, float most) {
    Floats total = {};
    for (int64_t i = 0; i < size; i += LANES) {
        Floats power = exp_of(load_upto(row + i, size - i) - most);
        total += size - i < LANES ? load_some((const float *)&power, size - i) : power;
    }
    return most + std::log(sum(total));
}

}  // namespace

extern "C" void likeliest_float32(int64_t *index, float *log_probs, const float *logits, int64_t rows, int64_t size,
                                  int64_t k, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const float *row = logits + r * size;
        highest(row, size, k, index + r * k);
        if (!log_probs) {
            int64_t nan = first_nan(row, size);
            if (nan >= 0)
                index[r * k] = nan;
            continue;
        }
        float whole = log_sum_exp(row, size, row[index[r * k]]);
        for (int64_t i = 0; i < k; i++)
            log_probs[r * k + i] = row[index[r * k + i]] - whole;
    }
}

#define FOR_DTYPE(T, NAME)                                                                                             \
    extern "C" void add_rms_norm_##NAME(T *out, T *residual, const T *delta, const T *weight, int64_t rows,            \
                                        int64_t size, float eps, int threads) {                                        \
        add_rms_norm(out, residual, delta, weight, rows, size, eps, threads);                                          \
    }                                                                                                                  \
    extern "C" void silu_mul_##NAME(T *out, const T *gate_up, int64_t rows, int64_t size, int threads) {               \
        silu_mul(out, gate_up, rows, size, threads);                                                                   \
    }

#define FOR_CACHE(T, K, NAME)                                                                                          \
    extern "C" void rotate_and_write_##NAME(T *qkv, K *keys, K *values, const int64_t *cells, const float *cosine,     \
                                            const float *sine, const T *q_norm, const T *k_norm, float eps,            \
                                            int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int threads) { \
        rotate_and_write(qkv, keys, values, cells, cosine, sine, q_norm, k_norm, eps, rows, heads, kv_heads, dim,      \
                         threads);                                                                                     \
    }                                                                                                                  \
    extern "C" void attend_##NAME(const Rows *rows, const Heads *heads, const T *query, const K *keys,                 \
                                  const K *values, T *out, const float *sinks) {                                       \
        attend(*rows, *heads, query, keys, values, out, sinks);                                                        \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(bf16, bfloat16)
FOR_CACHE(float, float, float32)
FOR_CACHE(bf16, bf16, bfloat16)
FOR_CACHE(float, bf16, float32_bfloat16)
