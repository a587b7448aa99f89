// Attention of the rows of many sequences over a paged cache on a CPU, in fp32 and bf16.
//
// A thread takes some rows of one sequence with one key/value head. Their queries, those of all its query heads, read a
// stretch of keys while it is in the processor's first cache, and later the stretches of values likewise: many queries
// cost the memory as much as one.
//
// A query's result has the same bits whatever is beside it. A score is summed by `dots` in one order, however many
// queries and keys share a call; the largest score and the sum of weights are found once all scores are there; and
// values are added one after the other: those of the query's columns, then those of its tree.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cpu_ops.h"
#include "parallel.h"
#include "vectors.h"

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif
constexpr int KEYS = 4;                                  // that meet some queries at once: their sums stay in registers
constexpr int QUERIES = REGISTERS == 32 ? 4 : 3;         // that meet some keys at once
constexpr int SUMS = 6, WIDE = REGISTERS == 32 ? 4 : 2;  // queries whose values are summed at once, by WIDE vectors
constexpr int64_t STRETCH = 32;                          // columns that all queries of a task read in turn
constexpr int64_t MOST_ROWS = 16;                        // of a task: the scores of more leave the second cache
constexpr int64_t FEWEST_QUERIES = 12;                   // of a task, where there are more tasks than threads need
constexpr int64_t TASKS_PER_THREAD = 4;

// One query head of a row. scores and sums are of this query alone; scores[c] is that of column c, and then its weight.
struct Query {
    const float *numbers;
    float *scores, *sums;
    int64_t begin, end;
    float scale;  // of the sums: 1 over the sum of weights
};

// Columns [first, last) of a cache, which lie `step` numbers apart from `from` on. ahead: those that come next, or null.
template <typename X> struct Stretch {
    const X *from;
    int64_t step, first, last;
    const X *ahead;

    const X *at(int64_t column) const { return from + (column - first) * step; }
};

// Where some queries see all columns: [from, to), which may be empty, of columns [first, last).
struct Common {
    int64_t from, to;

    Common(const Query *queries, int count, int64_t first, int64_t last) : from(first), to(last) {
        for (int j = 0; j < count; j++) {
            from = std::max(from, queries[j].begin);
            to = std::min(to, queries[j].end);
        }
        if (from >= to)
            from = to = last;
    }
};

// Room for a task, kept by its thread.
struct Scratch {
    std::vector<float> numbers, scores, sums, widened;
    std::vector<Query> queries;
    int64_t key_size, value_size;
};

template <int COUNT> inline void store_sums(const Floats *total, float *to) {
    if constexpr (COUNT == KEYS) {
        Floats4 found = sums(total);
        memcpy(to, &found, sizeof(found));
    } else {
        for (int m = 0; m < COUNT; m++)
            to[m] = sum(total[m]);
    }
}

// Zeros of a block's own: GCC clears an array that is given zeros as a whole by a call's worth of instructions.
template <int N, int M> inline void clear(Floats (&total)[N][M]) {
#pragma GCC unroll 4
    for (int j = 0; j < N; j++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
            total[j][m] = Floats{};
}

// The scores of N queries for M keys that lie `step` numbers apart, for columns from `column` on. HAS_REST: dim is no
// multiple of LANES.
template <int N, int M, bool HAS_REST, typename K>
inline void dots_of(const Query *queries, const K *keys, int64_t step, int64_t dim, int64_t column) {
    Floats total[N][M];
    clear(total);
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES) {
        Floats x[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
            x[m] = load(keys + m * step + i);
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) {
            Floats y = load(queries[j].numbers + i);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++)
                total[j][m] += y * x[m];
        }
    }
    if constexpr (HAS_REST)
        for (int m = 0; m < M; m++) {
            Floats x = load_some(keys + m * step + i, dim - i);
            for (int j = 0; j < N; j++)
                total[j][m] += load(queries[j].numbers + i) * x;
        }
#pragma GCC unroll 4
    for (int j = 0; j < N; j++)
        store_sums<M>(total[j], queries[j].scores + column);
}

template <int N, int M, typename K>
inline void dots(const Query *queries, const K *keys, int64_t step, int64_t dim, int64_t column) {
    if (dim % LANES)
        dots_of<N, M, true>(queries, keys, step, dim, column);
    else
        dots_of<N, M, false>(queries, keys, step, dim, column);
}

// Fetches what lies one stretch behind `count` columns.
template <typename X> inline void fetch(const Stretch<X> &stretch, int64_t column, int64_t count, int64_t dim) {
    if (!stretch.ahead)
        return;
    const X *from = stretch.ahead + (column - stretch.first) * stretch.step;
    for (int64_t m = 0; m < count; m++)
        for (int64_t i = 0; i < dim; i += 64 / sizeof(X))
            __builtin_prefetch(from + m * stretch.step + i);
}

template <typename T, typename K> struct Attention {  // of one pass and layer: T of queries, K of the cache
    const Rows &rows;
    const Heads &heads;
    const T *query;
    const K *keys, *values;
    T *out;
    const float *sinks;

    int64_t group() const { return heads.heads / heads.kv_heads; }
    int64_t cell(int64_t slot, int64_t column) const {
        const int64_t *blocks = rows.table + slot * rows.table_width;
        return blocks[column / rows.block_size] * rows.block_size + column % rows.block_size;
    }
    const K *key(int64_t cell, int64_t head) const { return keys + (cell * heads.kv_heads + head) * heads.key_dim; }
    const K *value(int64_t cell, int64_t head) const {
        return values + (cell * heads.kv_heads + head) * heads.value_dim;
    }

    void attend(Scratch &s, const AttentionTask &task) const {
        prepare(s, task);
        int64_t slot = rows.slots[task.first], first = INT64_MAX, last = 0;
        for (int64_t r = task.first; r < task.last; r++)
            if (rows.begin[r] < rows.end[r]) {
                first = std::min(first, rows.begin[r]);
                last = std::max(last, rows.end[r]);
            }
        for_stretches(s, keys, heads.key_dim, slot, task.kv_head, first, last,
                      [&](const auto &stretch) { score(s, stretch); });
        for (int64_t r = task.first; r < task.last; r++)
            finish_scores(s, task, r);
        for_stretches(s, values, heads.value_dim, slot, task.kv_head, first, last,
                      [&](const auto &stretch) { add_values(s, stretch); });
        for (int64_t r = task.first; r < task.last; r++)
            finish_sums(s, task, r);
    }

    // Reads the task's queries as fp32, and gives them room.
    void prepare(Scratch &s, const AttentionTask &task) const {
        int64_t count = (task.last - task.first) * group(), columns = 0;
        for (int64_t r = task.first; r < task.last; r++)
            columns = std::max(columns, rows.end[r] - rows.begin[r]);
        columns = (columns + rows.columns + LANES - 1) / LANES * LANES;
        s.key_size = (heads.key_dim + LANES - 1) / LANES * LANES;
        s.value_size = (heads.value_dim + LANES - 1) / LANES * LANES;
        s.numbers.resize(count * s.key_size);
        s.sums.assign(count * s.value_size, 0.0f);
        s.queries.resize(count);
        if ((int64_t)s.scores.size() < count * columns)
            s.scores.resize(count * columns);
        for (int64_t q = 0; q < count; q++) {
            int64_t r = task.first + q / group(), head = task.kv_head * group() + q % group();
            const T *from = query + r * heads.row_stride + head * heads.head_stride;
            float *numbers = s.numbers.data() + q * s.key_size;
            for (int64_t i = 0; i < heads.key_dim; i += LANES)
                store(numbers + i, load_upto(from + i, heads.key_dim - i));
            float *scores = s.scores.data() + q * columns - rows.begin[r];
            s.queries[q] = {numbers, scores, s.sums.data() + q * s.value_size, rows.begin[r], rows.end[r], 0.0f};
        }
    }

    // Calls function(stretch) for columns [first, last) of a slot, in order. Those in bf16 are widened for many queries.
    template <typename Function>
    void for_stretches(Scratch &s, const K *cache, int64_t dim, int64_t slot, int64_t head, int64_t first, int64_t last,
                       const Function &function) const {
        auto place = [&](int64_t column) { return cache + (cell(slot, column) * heads.kv_heads + head) * dim; };
        bool is_widened = std::is_same<K, bf16>::value && (int64_t)s.queries.size() > SUMS;
        const K *from = first < last ? place(first) : nullptr;
        while (first < last) {
            int64_t stop = std::min({last, first + STRETCH, (first / rows.block_size + 1) * rows.block_size});
            const K *ahead = stop < last ? place(stop) : nullptr;
            Stretch<K> stretch = {from, heads.kv_heads * dim, first, stop, ahead};
            if (is_widened)
                function(widened(s, stretch, dim));
            else
                function(stretch);
            first = stop;
            from = ahead;
        }
    }

    Stretch<float> widened(Scratch &s, const Stretch<K> &stretch, int64_t dim) const {
        s.widened.resize(STRETCH * dim);
        for (int64_t c = stretch.first; c < stretch.last; c++) {
            fetch(stretch, c, 1, dim);
            float *to = s.widened.data() + (c - stretch.first) * dim;
            for (int64_t i = 0; i < dim; i += LANES)
                store_upto(to + i, load_upto(stretch.at(c) + i, dim - i), dim - i);
        }
        return {s.widened.data(), dim, stretch.first, stretch.last, nullptr};
    }

    // Calls function(N, queries, begin, end) for N queries at a time and the columns of a stretch that they all see, and
    // with N = 1 for those that a query sees besides: each query's columns come in order.
    template <int MOST, typename X, typename Function>
    static void for_queries(const Scratch &s, const Stretch<X> &stretch, const Function &function) {
        by_count<MOST>(s.queries.size(), [&](auto count, int64_t q) {
            const Query *some = s.queries.data() + q;
            std::integral_constant<int, 1> one;
            Common common(some, count, stretch.first, stretch.last);
            for (int j = 0; j < count; j++)
                function(one, some + j, std::max(stretch.first, some[j].begin), std::min(common.from, some[j].end));
            function(count, some, common.from, common.to);
            for (int j = 0; j < count; j++)
                function(one, some + j, std::max(common.to, some[j].begin), std::min(stretch.last, some[j].end));
        });
    }

    template <typename X> void score(Scratch &s, const Stretch<X> &stretch) const {
        for_queries<QUERIES>(s, stretch, [&](auto count, const Query *queries, int64_t begin, int64_t end) {
            score_columns<count>(queries, stretch, begin, end, queries == s.queries.data());
        });
    }

    // Scores of N queries for columns [begin, end). fetches: those ahead, too.
    template <int N, typename X>
    void score_columns(const Query *queries, const Stretch<X> &stretch, int64_t begin, int64_t end,
                       bool fetches) const {
        for (int64_t column = begin; column < end;) {
            int64_t number = end - column >= KEYS ? KEYS : 1;
            if (fetches)
                fetch(stretch, column, number, heads.key_dim);
            if (number == KEYS)
                dots<N, KEYS>(queries, stretch.at(column), stretch.step, heads.key_dim, column);
            else
                dots<N, 1>(queries, stretch.at(column), stretch.step, heads.key_dim, column);
            column += number;
        }
    }

    // Scores a row's tree, and turns its scores into weights.
    void finish_scores(Scratch &s, const AttentionTask &task, int64_t r) const {
        Query *queries = s.queries.data() + (r - task.first) * group();
        int64_t count = std::max<int64_t>(rows.end[r] - rows.begin[r], 0);
        for (int64_t c = 0; c < rows.columns; c++)
            if (rows.mask[r * rows.columns + c]) {
                const K *k = key(cell(rows.slots[r], rows.trunk[r] + c), task.kv_head);
                by_count<QUERIES>(group(), [&](auto number, int64_t j) {
                    dots<number, 1>(queries + j, k, 0, heads.key_dim, rows.begin[r] + count);
                });
                count++;
            }
        for (int64_t j = 0; j < group(); j++) {
            float sink = sinks ? sinks[task.kv_head * group() + j] : 0.0f;
            float total = softmax(queries[j].scores + rows.begin[r], count, sink, sinks != nullptr);
            queries[j].scale = count ? 1.0f / total : 0.0f;
        }
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

    template <typename X> void add_values(Scratch &s, const Stretch<X> &stretch) const {
        for_queries<SUMS>(s, stretch, [&](auto count, const Query *queries, int64_t begin, int64_t end) {
            if (begin >= end)
                return;
            if (queries == s.queries.data())
                fetch(stretch, begin, end - begin, heads.value_dim);
            add_columns<count>(queries, stretch.at(begin), stretch.step, begin, end);
        });
    }

    // Adds the values of columns [begin, end), which lie `step` numbers apart, to the sums of N queries.
    template <int N, typename X>
    void add_columns(const Query *queries, const X *from, int64_t step, int64_t begin, int64_t end) const {
        int64_t i = 0;
        for (; i + WIDE * LANES <= heads.value_dim; i += WIDE * LANES)
            add_vectors<N, WIDE>(queries, from + i, step, begin, end, i);
        for (; i + LANES <= heads.value_dim; i += LANES)
            add_vectors<N, 1>(queries, from + i, step, begin, end, i);
        for (int j = 0; i < heads.value_dim && j < N; j++)
            for (int64_t c = begin; c < end; c++) {
                Floats x = load_some(from + (c - begin) * step + i, heads.value_dim - i);
                store(queries[j].sums + i, load(queries[j].sums + i) + queries[j].scores[c] * x);
            }
    }

    // Adds VECTORS vectors of each value, the first at number i.
    template <int N, int VECTORS, typename X>
    void add_vectors(const Query *queries, const X *from, int64_t step, int64_t begin, int64_t end, int64_t i) const {
        Floats total[N][VECTORS];
        const float *weights[N];
#pragma GCC unroll 8
        for (int j = 0; j < N; j++) {
            weights[j] = queries[j].scores;
#pragma GCC unroll 4
            for (int w = 0; w < VECTORS; w++)
                total[j][w] = load(queries[j].sums + i + w * LANES);
        }
        for (int64_t c = begin; c < end; c++) {
            Floats x[VECTORS];
#pragma GCC unroll 4
            for (int w = 0; w < VECTORS; w++)
                x[w] = load(from + (c - begin) * step + w * LANES);
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) {
                float weight = weights[j][c];
#pragma GCC unroll 4
                for (int w = 0; w < VECTORS; w++)
                    total[j][w] += weight * x[w];
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < N; j++)
#pragma GCC unroll 4
            for (int w = 0; w < VECTORS; w++)
                store(queries[j].sums + i + w * LANES, total[j][w]);
    }

    // Adds the values of a row's tree, and writes what the row attends to.
    void finish_sums(Scratch &s, const AttentionTask &task, int64_t r) const {
        Query *queries = s.queries.data() + (r - task.first) * group();
        int64_t column = std::max(rows.end[r], rows.begin[r]);  // of the next weight
        for (int64_t c = 0; c < rows.columns; c++)
            if (rows.mask[r * rows.columns + c]) {
                const K *v = value(cell(rows.slots[r], rows.trunk[r] + c), task.kv_head);
                by_count<SUMS>(group(), [&](auto number, int64_t j) {
                    add_columns<number>(queries + j, v, 0, column, column + 1);
                });
                column++;
            }
        for (int64_t j = 0; j < group(); j++) {
            T *to = out + (r * heads.heads + task.kv_head * group() + j) * heads.value_dim;
            float scale = queries[j].scale;
            for (int64_t i = 0; i < heads.value_dim; i += LANES)
                store_upto(to + i, load(queries[j].sums + i) * scale, heads.value_dim - i);
        }
    }
};

}  // namespace

std::vector<AttentionTask> attention_tasks(const Rows &rows, const Heads &heads) {
    int64_t fewest = (FEWEST_QUERIES * heads.kv_heads + heads.heads - 1) / heads.heads;
    int64_t wanted = rows.rows * heads.kv_heads / (TASKS_PER_THREAD * std::max(heads.threads, 1));
    int64_t most = std::min(std::max(wanted, fewest), MOST_ROWS);
    std::vector<AttentionTask> tasks;
    for (int64_t first = 0, last; first < rows.rows; first = last) {
        for (last = first + 1; last < rows.rows && last < first + most; last++)
            if (rows.slots[last] != rows.slots[first])
                break;
        for (int64_t head = 0; head < heads.kv_heads; head++)
            tasks.push_back({first, last, head});
    }
    return tasks;
}

template <typename T, typename K>
void attend_tasks(const std::vector<AttentionTask> &tasks, std::atomic<int64_t> &next, const Rows &rows,
                  const Heads &heads, const T *query, const K *keys, const K *values, T *out, const float *sinks) {
    thread_local Scratch scratch;
    Attention<T, K> attention{rows, heads, query, keys, values, out, sinks};
    int64_t num_tasks = tasks.size();
    for (int64_t t = next++; t < num_tasks; t = next++)
        attention.attend(scratch, tasks[t]);
}

namespace {

template <typename T, typename K>
void attend(const Rows &rows, const Heads &heads, const T *query, const K *keys, const K *values, T *out,
            const float *sinks) {
    const std::vector<AttentionTask> tasks = attention_tasks(rows, heads);
    std::atomic<int64_t> next{0};
    parallel(tasks.size() > 1 ? heads.threads : 1,
             [&](const team::Member &) { attend_tasks(tasks, next, rows, heads, query, keys, values, out, sinks); });
}

}  // namespace

#define FOR_CACHE(T, K, NAME)                                                                                          \
    template void attend_tasks(const std::vector<AttentionTask> &, std::atomic<int64_t> &, const Rows &,               \
                               const Heads &, const T *, const K *, const K *, T *, const float *);                    \
    extern "C" void attend_##NAME(const Rows *rows, const Heads *heads, const T *query, const K *keys,                 \
                                  const K *values, T *out, const float *sinks) {                                       \
        attend(*rows, *heads, query, keys, values, out, sinks);                                                        \
    }

FOR_CACHE(float, float, float32)
FOR_CACHE(bf16, bf16, bfloat16)
FOR_CACHE(float, bf16, float32_bfloat16)
