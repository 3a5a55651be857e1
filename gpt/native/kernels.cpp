// What a decode step spends its time on, for processors: the product of a few rows with a matrix
// that is read once, and a few tokens' attention over pages of the cache, read where they lie; and
// what a training step of a small model spends its time on beside the library's products.
//
// Plain C functions over addresses: no header of torch or Python is needed, so it compiles in
// seconds and serves any version of both. `gpt.native.build` compiles it, `gpt.native.kernels` calls
// it. Threads are OpenMP's, of the copy that torch has loaded, hence torch's own.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#define METHOD inline __attribute__((always_inline))
#define INLINE static METHOD

struct bf16 {
    uint16_t bits;
};

INLINE float number(float value) { return value; }
INLINE float number(bf16 value) {
    uint32_t bits = (uint32_t)value.bits << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
INLINE void put(float& to, float value) { to = value; }
INLINE void put(bf16& to, float value) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = value != value ? 0x7fc0 : (uint16_t)rounded;
}

INLINE int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// A thread's own memory, kept between calls. Pieces are told apart by `which`. One in huge pages needs
// few of their places at hand, however far apart it is read.
static float* scratch(int which, int64_t count, bool huge = false) {
    struct Kept {
        float* data[6] = {};
        int64_t size[6] = {};
        ~Kept() {
            for (float* each : data) std::free(each);
        }
    };
    static thread_local Kept kept;
    if (kept.size[which] < count) {
        std::free(kept.data[which]);
        const int64_t page = huge ? 2 << 20 : 4096, bytes = rounded_up(count * 4, page);
        kept.data[which] = (float*)std::aligned_alloc(huge ? page : 64, bytes);
        if (!kept.data[which]) std::abort();
#if defined(__linux__)
        if (huge) madvise(kept.data[which], bytes, MADV_HUGEPAGE);
#endif
        kept.size[which] = bytes / 4;
    }
    return kept.data[which];
}

// How many rows of a matrix a thread takes at a time: several shares for each, as threads are not
// equally fast, but no more than stay in L2 while rows of x take turns.
static int64_t share(int64_t rows, int64_t row_bytes, int threads) {
    int64_t each = rows / (threads * 6), most = 192 * 1024 / row_bytes;
    each = each > most ? most : each;
    return each < 16 ? 16 : each / 8 * 8;
}

// What a row goes through before it is multiplied.
enum { NOTHING, LAYER_NORM, RMS_NORM, GELU, RELU2, SWIGLU };

struct Product {
    const void *x, *weight, *bias, *onto;  // (M, K) or null; (N, K); (N) or null; (M, N) or null
    void* y;                               // (M, N) or null
    const void *norm_weight, *norm_bias;   // (K) or null
    int64_t onto_y_of;  // instead of `onto`: which product's y; -1: none
    int64_t N, K;
    double eps;
    float scale;
    int before;
};

// Queries and keys of M tokens, to be normed and turned where they lie.
struct Turn {
    void* rows;                         // (M, heads * D), `row` numbers apart
    const void *q_weight, *k_weight;    // (D) of the norms, or null
    const float *cos, *sin;             // (M, pairs), or null
    int64_t row, H, K, D, pairs;
    float eps;
    int interleaved;
};

// Rows normed by their root mean square.
struct Normed {
    const float *x, *weight, *dy;            // (M, C), (C), (M, C)
    float *y, *factors, *dx, *dweight;       // (M, C), (M) or null, (M, C), (C) or null
    int64_t M, C;
    float eps;
    int threads;
};

// Sequences of T tokens, each mixed with the k - 1 before it.
struct Convolved {
    const float *x, *weight, *dy;  // (M, C), (C, k), (M, C)
    float *y, *dx, *dweight;       // (M, C), (M, C) or null, (C, k) or null
    const int64_t* positions;      // (M) within documents, or null
    int64_t M, T, C, k;
    int threads;
    // How many tokens there are before one.
    int64_t before(int64_t m) const {
        return positions && positions[m] < m % T ? positions[m] : m % T;
    }
};

// Queries, keys and values of M tokens that lie in one row each, taken apart.
struct Turned {
    const float* rows;                       // (M, (H + 2 K) * D)
    float *drows, *q, *k, *v;                // as rows; (M, H, D), (M, K, D), (M, K, D)
    const float *q_weight, *k_weight;        // (D) of the norms, or null
    float *factors, *dweights;               // (M, H + K) and (2, D) of the norms, or null
    const float *cos, *sin;                  // (period, pairs), for token m row m % period
    int64_t M, H, K, D, pairs, period;       // 0 pairs: not turned
    float eps;
    int interleaved, threads;
};

// Whole sequences, in which every token sees itself and those before. Heads' numbers lie side by side.
struct Causal {
    const float *q, *k, *v, *dout;  // (B, T, H or K, D), as far apart as said below; dout as `out`
    float *out, *lse;               // (B, T, H, D), (B, H, T)
    float *dq, *dk, *dv;            // (B, T, H or K, D)
    int64_t B, T, H, K, D, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h;
    float scale;
    int threads;
};

struct Attend {
    const void *q, *keys, *values;
    void* out;
    const int64_t* rows;   // (b, t) or null: all in order
    const int64_t* pages;  // (b, n_pages) or null: keys lie side by side from first_slot on
    const uint8_t* sees;   // (b, t, s) or null
    const float* bias;     // (b or 1, H or 1, t, s) or null
    int64_t b, t, H, K, D, s, n_pages, page_size, skip, first_slot, slots, q_row, bias_b, bias_h;
    float scale, softcap;  // 0: none
    int threads;
};

// A matrix that Muon moves, its gradient and the running mean of that; rate includes the shape's.
struct Matrix {
    float *weight, *mean;
    const float* grad;
    float* squares;
    int64_t rows, columns;
    float momentum, beta2, rate, keep;
};

// gpt/training/muon.py's polynomial, square (G + shift)^2 + rest, and the least norm divided by.
struct Quintic {
    float shift, rest, square, floor;
    int iterations;
};

#define DEPTH 768   // numbers of each row that a tile runs over at a time: so much stays in L1
#define AHEAD 512   // bytes

namespace plain {
#define LANES 4
#define ROWS 8
#include "all.inl"
#undef LANES
#undef ROWS
}  // namespace plain

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#define LANES 8
#define ROWS 8
#include "all.inl"
#undef LANES
#undef ROWS
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,fma"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
#endif
namespace avx512 {
#define LANES 16
#define ROWS 8
#include "all.inl"
#undef LANES
#undef ROWS
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

// 0: plain, 1: AVX2, 2: AVX-512
extern "C" int antiphon_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

#if defined(__x86_64__)
#define DISPATCH(level, call)        \
    switch (level) {                 \
        case 2: avx512::call; break; \
        case 1: avx2::call; break;   \
        default: plain::call;        \
    }
#else
#define DISPATCH(level, call) plain::call
#endif

extern "C" void antiphon_chain(int level, int is_bf16, Product* products, int64_t count, int64_t M,
                               int threads) {
    if (is_bf16) {
        DISPATCH(level, chain<bf16>(products, count, M, threads))
    } else {
        DISPATCH(level, chain<float>(products, count, M, threads))
    }
}

extern "C" void antiphon_turn(int level, int is_bf16, const Turn* t, int64_t M) {
    if (is_bf16) {
        DISPATCH(level, turn<bf16>(*t, M))
    } else {
        DISPATCH(level, turn<float>(*t, M))
    }
}

extern "C" void antiphon_attend(int level, int is_bf16, const Attend* a) {
    if (is_bf16) {
        DISPATCH(level, attend<bf16>(*a))
    } else {
        DISPATCH(level, attend<float>(*a))
    }
}

extern "C" void antiphon_norm(int level, int back, const Normed* n) {
    if (back) {
        DISPATCH(level, norm_backward(*n))
    } else {
        DISPATCH(level, norm_forward(*n))
    }
}

extern "C" void antiphon_convolve(int level, int back, const Convolved* c) {
    if (back) {
        DISPATCH(level, conv_backward(*c))
    } else {
        DISPATCH(level, conv_forward(*c))
    }
}

extern "C" void antiphon_take_apart(int level, int back, const Turned* t) {
    if (back) {
        DISPATCH(level, turn_backward(*t))
    } else {
        DISPATCH(level, turn_forward(*t))
    }
}

extern "C" void antiphon_causal(int level, int back, const Causal* a) {
    DISPATCH(level, causal(*a, back))
}

extern "C" void antiphon_square_relu(int level, const float* x, const float* dy, float* y,
                                     int64_t count, int threads) {
    DISPATCH(level, square_relu(x, dy, y, count, threads))
}

extern "C" void antiphon_drop(int level, const float* x, const float* branch, float* y,
                              int64_t count, uint64_t seed, float p, float factor, int threads) {
    DISPATCH(level, drop(x, branch, y, count, seed, p, factor, threads))
}

// Each matrix is one thread's, so that what comes of it does not depend on how many there are.
extern "C" void antiphon_muon(int level, const Matrix* matrices, int64_t count,
                                       const Quintic* quintic, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t i = 0; i < count; i++) DISPATCH(level, muon(matrices[i], *quintic))
}

// Keys and values of new tokens into their slots of the cache; pages only begun are zeroed first.
// `item` is the bytes of a number, k_row the distance of two tokens' keys.
extern "C" void antiphon_store(const char* k, const char* v, char* keys, char* values,
                               const int64_t* slots, const int64_t* begun, int64_t N, int64_t K,
                               int64_t D, int64_t k_row, int64_t v_row, int64_t n_slots,
                               int64_t n_begun, int64_t page_size, int64_t item) {
    for (int64_t head = 0; head < K; head++) {
        char *own_keys = keys + head * n_slots * D * item, *own_values = values + head * n_slots * D * item;
        for (int64_t i = 0; i < n_begun; i++) {
            int64_t at = begun[i] * page_size * D * item, size = page_size * D * item;
            std::memset(own_keys + at, 0, size);
            std::memset(own_values + at, 0, size);
        }
        for (int64_t n = 0; n < N; n++) {
            int64_t at = slots[n] * D * item, size = D * item;
            std::memcpy(own_keys + at, k + (n * k_row + head * D) * item, size);
            std::memcpy(own_values + at, v + (n * v_row + head * D) * item, size);
        }
    }
}
