// Vectors of the processor's width for the files of this library: GCC's vector extensions, so that one source serves
// AVX-512, AVX2 and NEON.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu_ops.h"

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;  // of the processor's vectors: wider ones are emulated, at ten times the cost
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int64_t SMALL = 1 << 14;  // numbers below which starting threads costs more than they save

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef float Floats16 __attribute__((vector_size(64)));
typedef float Floats8 __attribute__((vector_size(32)));
typedef float Floats4 __attribute__((vector_size(16)));
typedef int32_t Ints4 __attribute__((vector_size(16)));

// Calls function(N, first) for `count` things, N at a time: MOST, and at last those that are left. N is a constant.
template <int MOST, typename Function> void by_count(int64_t count, const Function &function, int64_t first = 0) {
    for (; first + MOST <= count; first += MOST)
        function(std::integral_constant<int, MOST>(), first);
    if constexpr (MOST > 1)
        by_count<MOST - 1>(count, function, first);
}

inline Floats load(const float *from) { return *reinterpret_cast<const Floats *>(from); }

inline Floats load(const bf16 *from) {
    Words wide = __builtin_convertvector(*reinterpret_cast<const Halves *>(from), Words) << 16;
    return (Floats)wide;
}

inline void store(float *to, Floats value) { *reinterpret_cast<Floats *>(to) = value; }

inline void store(bf16 *to, Floats value) {
    Words bits = (Words)value;
    Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    Words quiet = (bits >> 16) | 0x40;                           // rounding must not turn NaN into infinity
    rounded = (Words)(value == value) ? rounded : quiet;
    *reinterpret_cast<Halves *>(to) = __builtin_convertvector(rounded, Halves);
}

// The first `count` numbers, and zeros after them.
template <typename T> inline Floats load_some(const T *from, int count) {
    T padded[LANES] = {};
    memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

template <typename T> inline void store_some(T *to, Floats value, int count) {
    T padded[LANES];
    store(padded, value);
    memcpy(to, padded, count * sizeof(T));
}

template <typename T> inline Floats load_upto(const T *from, int64_t left) {
    return left >= LANES ? load(from) : load_some(from, left);
}

template <typename T> inline void store_upto(T *to, Floats value, int64_t left) {
    if (left >= LANES)
        store(to, value);
    else
        store_some(to, value, left);
}

// As if it had been stored and read again: where transformers rounds to the model's dtype, so do we.
inline Floats rounded(Floats value, const float *) { return value; }

inline Floats rounded(Floats value, const bf16 *) {
    bf16 kept[LANES];
    store(kept, value);
    return load(kept);
}

// The sums of a vector's lanes by their number modulo 4.
inline Floats4 folded(Floats4 v) { return v; }

inline Floats4 folded(Floats8 v) {
    return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
}

inline Floats4 folded(Floats16 v) {
    return folded(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                  __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
}

inline float sum(Floats v) {
    Floats4 b = folded(v);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// Each of four vectors of four lanes joined to one number: lanes 0 and 2 and lanes 1 and 3 first.
template <typename Four, typename Join> Four across(const Four *b, const Join &join) {
    Four low01 = __builtin_shufflevector(b[0], b[1], 0, 4, 1, 5),
         low23 = __builtin_shufflevector(b[2], b[3], 0, 4, 1, 5);
    Four high01 = __builtin_shufflevector(b[0], b[1], 2, 6, 3, 7),
         high23 = __builtin_shufflevector(b[2], b[3], 2, 6, 3, 7);
    Four pairs01 = join(low01, high01), pairs23 = join(low23, high23);
    return join(__builtin_shufflevector(pairs01, pairs23, 0, 1, 4, 5),
                __builtin_shufflevector(pairs01, pairs23, 2, 3, 6, 7));
}

// The sums of four vectors, each in the order of `sum`.
inline Floats4 sums(const Floats *v) {
    Floats4 b[4] = {folded(v[0]), folded(v[1]), folded(v[2]), folded(v[3])};
    return across(b, [](Floats4 x, Floats4 y) { return x + y; });
}

// The four lanes that a vector's lanes become if `join` joins those of one number modulo 4.
template <typename Join> Ints4 folded(Ints v, const Join &join) {
    Ints4 parts[LANES / 4];
    memcpy(parts, &v, sizeof(v));
    Ints4 all = parts[0];
    for (int i = 1; i < LANES / 4; i++)
        all = join(all, parts[i]);
    return all;
}

// Each of four vectors of integers joined to one.
template <typename Join> Ints4 joined(const Ints *v, const Join &join) {
    Ints4 b[4];
    for (int i = 0; i < 4; i++)
        b[i] = folded(v[i], join);
    return across(b, join);
}

// The sum and the largest of each of four vectors of integers.
inline Ints4 sums(const Ints *v) {
    return joined(v, [](Ints4 a, Ints4 b) { return a + b; });
}

inline Ints4 largest(const Ints *v) {
    return joined(v, [](Ints4 a, Ints4 b) { return a > b ? a : b; });
}

// A product whose rounding stays: the compiler must not fuse it with a sum that follows.
inline Floats unfused(Floats product) {
#if defined(__x86_64__)
    asm("" : "+v"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#endif
    return product;
}

inline double unfused(double product) {
#if defined(__x86_64__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#endif
    return product;
}

inline Floats broadcast(float x) { return x - (Floats){}; }

// e^x to 2 ulp (Cephes' expf); below -87 it is e^-87, which is nothing beside the e^0 of a softmax.
inline Floats exp_of(Floats x) {
    x = x < -87.0f ? broadcast(-87.0f) : x;
    x = x > 88.0f ? broadcast(88.0f) : x;
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    Floats n = (x * 1.44269504f + magic) - magic;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    return p * (Floats)exponent;
}

inline float largest(const float *from, int64_t count) {
    Floats wide = broadcast(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Floats x = load(from + i);
        wide = x > wide ? x : wide;
    }
    float most = -INFINITY;
    for (int lane = 0; lane < LANES; lane++)
        most = std::max(most, wide[lane]);
    for (; i < count; i++)
        most = std::max(most, from[i]);
    return most;
}

// The index of the first NaN, or -1.
inline int64_t first_nan(const float *row, int64_t size) {
    int has_nan = 0;
    for (int64_t i = 0; i < size; i++)
        has_nan |= row[i] != row[i];
    for (int64_t i = 0; has_nan && i < size; i++)
        if (row[i] != row[i])
            return i;
    return -1;
}

}  // namespace
