// Products with dense weights on a CPU: out = inputs @ weight.T + bias, with weights in fp32 and bf16, and sums in fp32.
//
// cpu_ops.py loads this file's library and says what the function computes. An output is summed in one order, whatever
// the processor, the other rows and the number of threads:
//
//     for each input i, in order:    total = fma(input[i], weight[i], total)
//     output = total + bias, rounded to the dtype of the rows
//
// Vectors hold successive outputs, so that a sum needs no other order. Weights lie in tiles of TILE outputs; a tile has
// the TILE weights of each input, one input after the other.

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

enum Path : int32_t { PORTABLE, VECTORS };  // PORTABLE: one output after the other, to which tests hold the other

constexpr int64_t TILE = 16;
constexpr int VECTORS_OF_TILE = TILE / LANES;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MOST_SUMS = 24;  // vectors of sums that stay in registers
#else
constexpr int MOST_SUMS = 12;
#endif
constexpr int MOST_ROWS = LANES == 16 ? 12 : 6;  // that meet a tile at once
constexpr int MOST_TILES = 4;                    // that one row meets at once: its sums alone would wait for each other
constexpr int64_t STRETCH = 256;                 // inputs of a tile that all rows read in turn, from the first cache
constexpr int64_t PANEL = 96;                    // rows whose inputs of a stretch stay in the second cache
constexpr int64_t WIDENED_PARTS = 3;             // of rows from which on weights in bf16 are widened once for all
constexpr int64_t FEW = 1 << 16;                 // multiplications below which waking threads costs more than it saves

template <int MOST, typename Function> void with_count(int count, const Function &function) {
    if constexpr (MOST > 1) {
        if (count < MOST)
            return with_count<MOST - 1>(count, function);
    }
    function(std::integral_constant<int, MOST>());
}

// How many tiles N rows meet at once.
constexpr int tiles_for(int rows) {
    int tiles = MOST_SUMS / (rows * VECTORS_OF_TILE);
    return tiles < 1 ? 1 : tiles > MOST_TILES ? MOST_TILES : tiles;
}

struct Nothing {
    void fetch(int64_t) const {}
};

// Weights that are fetched while others are multiplied: some bytes of them with each input.
struct Ahead {
    const char *from;
    int64_t bytes;

    void fetch(int64_t input) const { __builtin_prefetch(from + input * bytes); }
};

// Adds the products of `count` inputs to the sums of N rows and M tiles. Rows lie `stride` numbers apart, tiles of weights
// `step` numbers, and tiles of sums `apart` numbers. ahead: fetches what will be read next.
template <int N, int M, typename W, typename Next>
void add_products(float *sums, int64_t apart, const float *rows, int64_t stride, const W *weights, int64_t step,
                  int64_t count, const Next &ahead) {
    Floats total[N][M][VECTORS_OF_TILE];
#pragma GCC unroll 12
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS_OF_TILE; v++)
                total[r][m][v] = load(sums + m * apart + r * TILE + v * LANES);
    for (int64_t i = 0; i < count; i++) {
        ahead.fetch(i);
        Floats w[M][VECTORS_OF_TILE];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS_OF_TILE; v++)
                w[m][v] = load(weights + m * step + i * TILE + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < N; r++) {
            float input = rows[r * stride + i];
#pragma GCC unroll 4
            for (int m = 0; m < M; m++)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS_OF_TILE; v++)
                    total[r][m][v] += input * w[m][v];
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS_OF_TILE; v++)
                store(sums + m * apart + r * TILE + v * LANES, total[r][m][v]);
}

// The same for one tile, one sum after the other.
template <typename W> void add_products_portably(float *sums, const float *row, const W *weights, int64_t count) {
    for (int64_t lane = 0; lane < TILE; lane++)
        for (int64_t i = 0; i < count; i++) {
            float weight;
            if constexpr (std::is_same<W, bf16>::value) {
                uint32_t bits = (uint32_t)weights[i * TILE + lane].bits << 16;
                memcpy(&weight, &bits, 4);
            } else {
                weight = weights[i * TILE + lane];
            }
            sums[lane] = __builtin_fmaf(row[i], weight, sums[lane]);
        }
}

template <typename T> struct Product {
    T *out;
    const float *rows;  // in fp32
    const T *bias;
    const DenseWeight &w;

    void store_rows(const float *sums, int64_t tile, int64_t row, int64_t count) const {
        int64_t lanes = std::min(TILE, w.outputs - tile * TILE);
        for (int64_t i = 0; i < lanes; i += LANES) {
            int64_t left = lanes - i;
            Floats added = bias ? load_upto(bias + tile * TILE + i, left) : Floats{};
            for (int64_t r = 0; r < count; r++)
                store_upto(out + (row + r) * w.outputs + tile * TILE + i, load(sums + r * TILE + i) + added, left);
        }
    }

    // Tiles [tile, end) of few rows: each weight is read once.
    template <typename W> void few(int count, int64_t row, int64_t tile, int64_t end) const {
        const W *weights = (const W *)w.numbers;
        int64_t size = w.inputs * TILE;
        with_count<MOST_ROWS>(count, [&](auto num_rows) {
            constexpr int M = tiles_for(num_rows);
            for (int64_t t = tile; t < end;) {
                float sums[M * num_rows * TILE] = {};
                const float *inputs = rows + row * w.inputs;
                int64_t some = t + M <= end ? M : 1, apart = num_rows * TILE;
                if (some == M)
                    add_products<num_rows, M>(sums, apart, inputs, w.inputs, weights + t * size, size, w.inputs,
                                              Nothing());
                else
                    add_products<num_rows, 1>(sums, apart, inputs, w.inputs, weights + t * size, size, w.inputs,
                                              Nothing());
                for (int64_t m = 0; m < some; m++)
                    store_rows(sums + m * apart, t + m, row, num_rows);
                t += some;
            }
        });
    }

    // One tile of many rows, up to PANEL: a stretch of weights is read from the first cache.
    template <typename W> void many(int64_t count, int64_t row, int64_t tile) const {
        float sums[PANEL * TILE] = {};
        int64_t parts = (count + MOST_ROWS - 1) / MOST_ROWS;
        for (int64_t first = 0; first < w.inputs; first += STRETCH) {
            int64_t inputs = std::min(STRETCH, w.inputs - first);
            const W *weights = (const W *)w.numbers + (tile * w.inputs + first) * TILE;
            // The next stretch lies behind this one, be it of this tile or of the next.
            Ahead ahead = {(const char *)(weights + inputs * TILE), TILE * (int64_t)sizeof(W) / parts};
            if constexpr (std::is_same<W, bf16>::value) {
                if (parts >= WIDENED_PARTS) {
                    float widened[STRETCH * TILE];
                    for (int64_t i = 0; i < inputs * TILE; i += LANES)
                        store(widened + i, load(weights + i));
                    add_stretch(sums, parts, count, row, first, inputs, (const float *)widened, ahead);
                    continue;
                }
            }
            add_stretch(sums, parts, count, row, first, inputs, weights, ahead);
        }
        store_rows(sums, tile, row, count);
    }

    // Adds the products of some inputs to the sums of `count` rows, in parts of sizes as alike as can be.
    template <typename W>
    void add_stretch(float *sums, int64_t parts, int64_t count, int64_t row, int64_t first, int64_t inputs,
                     const W *weights, Ahead ahead) const {
        for (int64_t part = 0; part < parts; part++) {
            int64_t begin = count * part / parts, end = count * (part + 1) / parts;
            const float *from = rows + (row + begin) * w.inputs + first;
            with_count<MOST_ROWS>(end - begin, [&](auto number) {
                add_products<number, 1>(sums + begin * TILE, 0, from, w.inputs, weights, 0, inputs, ahead);
            });
            ahead.from += inputs * ahead.bytes;
        }
    }

    template <typename W> void portable(int64_t count, int64_t row, int64_t tile) const {
        for (int64_t r = row; r < row + count; r++) {
            float sums[TILE] = {};
            add_products_portably(sums, rows + r * w.inputs, (const W *)w.numbers + tile * w.inputs * TILE, w.inputs);
            store_rows(sums, tile, r, 1);
        }
    }

    template <typename W> void multiply(const team::Member &member, int64_t count) const {
        int64_t tiles = (w.outputs + TILE - 1) / TILE;
        team::Span mine = member.share(tiles);
        if (w.path == VECTORS && count <= MOST_ROWS) {
            few<W>(count, 0, mine.first, mine.last);
            return;
        }
        for (int64_t row = 0; row < count; row += PANEL)
            for (int64_t tile : mine)
                if (w.path == VECTORS)
                    many<W>(std::min(PANEL, count - row), row, tile);
                else
                    portable<W>(std::min(PANEL, count - row), row, tile);
    }
};

const float *widened(const float *rows, int64_t, int) { return rows; }

const float *widened(const bf16 *rows, int64_t count, int threads) {
    thread_local std::vector<float> of_thread;
    std::vector<float> &wide = of_thread;  // the caller's
    wide.resize((count + LANES - 1) / LANES * LANES);
    parallel(count > SMALL ? threads : 1, [&](const team::Member &member) {
        for (int64_t v : member.share((int64_t)wide.size() / LANES))
            store(wide.data() + v * LANES, load_upto(rows + v * LANES, count - v * LANES));
    });
    return wide.data();
}

template <typename T>
void dense_matmul(T *out, const T *inputs, const T *bias, const DenseWeight &w, int64_t rows, int threads) {
    Product<T> product = {out, widened(inputs, rows * w.inputs, threads), bias, w};
    parallel(rows * w.inputs * w.outputs > FEW ? threads : 1, [&](const team::Member &member) {
        if (w.is_bf16)
            product.template multiply<bf16>(member, rows);
        else
            product.template multiply<float>(member, rows);
    });
}

}  // namespace

// The best Path of this library; PORTABLE if its processor's vectors have no fused product and sum.
extern "C" int dense_matmul_path() {
#if defined(__FMA__) || defined(__aarch64__)
    return VECTORS;
#else
    return PORTABLE;
#endif
}

#define FOR_DTYPE(T, NAME)                                                                                             \
    extern "C" void dense_matmul_##NAME(T *out, const T *inputs, const T *bias, const DenseWeight *weight,             \
                                        int64_t rows, int32_t threads) {                                               \
        dense_matmul(out, inputs, bias, *weight, rows, threads);                                                       \
    }

FOR_DTYPE(float, float32)
FOR_DTYPE(bf16, bfloat16)
