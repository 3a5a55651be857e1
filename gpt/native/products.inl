// The kernels for one instruction set. kernels.cpp includes this file once for each, in a namespace
// of its own, with LANES floats in a vector; the compiler's vector types do the rest, so there is
// one text for AVX-512, AVX2 and whatever every processor of the kind has.
//
//   ROWS   of x that go through a matrix together: as many sums as there are registers for

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef float vf_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu_at __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

INLINE vf load(const float* from) { return *(const vf_at*)from; }
INLINE void save(float* to, vf value) { *(vf_at*)to = value; }
INLINE vf spread(float value) { return value - vf{}; }  // value + 0 is not value where that is -0
INLINE float total(vf v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

// bfloat16 is the upper half of a float32. A vector of pairs holds LANES numbers in its lower halves
// and LANES in its upper ones: two operations make floats of all, if the other factor has its even
// places before its odd ones, which `widen` sees to.
template <class T> struct Weights;
template <> struct Weights<float> {
    static constexpr int parts = 1, step = LANES;
    vf part[1];
    METHOD void read(const float* from) { part[0] = load(from); }
};
template <> struct Weights<bf16> {
    static constexpr int parts = 2, step = 2 * LANES;
    vf part[2];
    METHOD void read(const bf16* from) {
        vu pairs = *(const vu_at*)from;
        part[0] = (vf)(pairs << 16);
        part[1] = (vf)(pairs & 0xffff0000u);
    }
};

// k numbers as floats, in the order in which they meet weights of type W.
template <class W, class X> void widen(const X* from, float* to, int64_t k) {
    constexpr int step = Weights<W>::step;
    int64_t i = 0;
    if (step != LANES) {
        for (; i + step <= k; i += step)
            for (int j = 0; j < LANES; j++) {
                to[i + j] = number(from[i + 2 * j]);
                to[i + LANES + j] = number(from[i + 2 * j + 1]);
            }
    }
    for (; i < k; i++) to[i] = number(from[i]);
}

// How many numbers of a row a tile runs over at a time. One row of x fits into L1 whole.
INLINE int64_t depth_of(int64_t rows, int64_t k) { return rows == 1 || k < DEPTH ? k : DEPTH; }

// Row m of x, (rows, k), to where `product` reads it: `depth_of` numbers of each row stand side by
// side, then as many of what follows. Rows as they come would be a power of two apart in many models,
// and share the few places that L1 has for such.
template <class W, class X>
void pack(const X* x, int64_t m, int64_t rows, int64_t k, float* to) {
    const int64_t deep = depth_of(rows, k);
    for (int64_t from = 0; from < k; from += deep) {
        int64_t depth = k - from < deep ? k - from : deep;
        widen<W>(x + from, to + from * rows + m * depth, depth);
    }
}

// y[m][n] = or += sum over k of x[m][k] w[n][k]; x as `widen` lays it out, the N rows of w, and what
// comes of them, `apart` rows from each other. With few sums at hand each is split, so that one
// addition need not wait for the one before. What comes next is asked for meanwhile: AHEAD bytes on
// in each of several rows, or, beside one, the row `then`.
template <class W, int M, int N>
INLINE void tile(const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t k, float* y,
                 int64_t ldy, int64_t apart, bool more, const W* then) {
    constexpr int step = Weights<W>::step, parts = Weights<W>::parts;
    constexpr int split = M * N >= 4 ? 1 : 4 / (M * N);
    constexpr int line = step * sizeof(W) < 64 ? 64 / (step * sizeof(W)) : 1;
    constexpr int many = N > 1 ? line : split > parts ? split / parts : 1;
    vf sum[M][N][split] = {};
    auto add = [&](int64_t i, int j) __attribute__((always_inline)) {
        Weights<W> weights[N];
        for (int n = 0; n < N; n++) weights[n].read(w + n * apart * ldw + i);
        for (int m = 0; m < M; m++)
            for (int p = 0; p < parts; p++) {
                vf factor = load(x + m * ldx + i + p * LANES);
                for (int n = 0; n < N; n++)
                    sum[m][n][(j * parts + p) % split] += weights[n].part[p] * factor;
            }
    };
    int64_t i = 0;
    for (; i + many * step <= k; i += many * step) {
        if (N == 1)
            __builtin_prefetch(then + i);
        else
            for (int n = 0; n < N; n++)
                __builtin_prefetch((const char*)(w + n * apart * ldw + i) + AHEAD);
        for (int j = 0; j < many; j++) add(i + j * step, j);
    }
    for (; i + step <= k; i += step) add(i, 0);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            vf whole = sum[m][n][0];
            for (int j = 1; j < split; j++) whole += sum[m][n][j];
            float rest = total(whole);
            for (int64_t j = i; j < k; j++)
                rest += x[m * ldx + j] * number(w[n * apart * ldw + j]);
            float* to = y + m * ldy + n * apart;
            *to = more ? *to + rest : rest;
        }
}

// Few rows of x: N rows of w at a time, far from each other. The processor looks ahead within a page
// of memory only, so several streams are read a third faster than one.
template <class W, int M, int N>
void streams(const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t columns, int64_t k,
             float* y, int64_t ldy, bool more) {
    const int64_t apart = columns / N;
    for (int64_t n = 0; n < apart; n++)
        tile<W, M, N>(x, ldx, w + n * ldw, ldw, k, y + n, ldy, apart, more, w);
    for (int64_t n = apart * N; n < columns; n++)
        tile<W, M, 1>(x, ldx, w + n * ldw, ldw, k, y + n, ldy, 1, more, w + n * ldw);
}

// M rows of x, which stay in L1, and all rows of w, which come from memory once and from L2 for the
// next M: rows of two halves in turn, each asked for while the one before is read.
template <class W, int M>
void band(const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t columns, int64_t k,
          float* y, int64_t ldy, bool more) {
    const int64_t half = columns / 2;
    auto row = [&](int64_t n, int64_t then) __attribute__((always_inline)) {
        tile<W, M, 1>(x, ldx, w + n * ldw, ldw, k, y + n, ldy, 1, more, w + then * ldw);
    };
    for (int64_t n = 0; n < half; n++) {
        row(n, half + n);
        row(half + n, n + 1);
    }
    if (columns % 2) row(columns - 1, columns - 1);
}

// y (rows, columns) = x (rows, k) w (columns, k)^T; x as `pack` lays it out.
template <class W>
void product(const float* x, int64_t rows, const W* w, int64_t ldw, int64_t columns, int64_t k,
             float* y) {
    const int64_t deep = depth_of(rows, k);
    for (int64_t from = 0; from < k; from += deep) {
        int64_t depth = k - from < deep ? k - from : deep, m = 0;
        auto at = [&](int64_t m) { return x + from * rows + m * depth; };
        auto to = [&](int64_t m) { return y + m * columns; };
        const W* own = w + from;
        for (; m + ROWS <= rows; m += ROWS)
            band<W, ROWS>(at(m), depth, own, ldw, columns, depth, to(m), columns, from);
        for (; m + 4 <= rows; m += 4)
            streams<W, 4, 2>(at(m), depth, own, ldw, columns, depth, to(m), columns, from);
        for (; m + 2 <= rows; m += 2)
            streams<W, 2, 4>(at(m), depth, own, ldw, columns, depth, to(m), columns, from);
        if (m < rows) streams<W, 1, 4>(at(m), depth, own, ldw, columns, depth, to(m), columns, from);
    }
}

// e to the x for x <= 0: 2 to the whole part by the exponent's bits, times a polynomial for the rest
// (Cephes' coefficients, off by 2e-7 of the result); 0 below -87.
INLINE vf power(vf x) {
    vf low = spread(-87.0f);
    vi tiny = x < low;
    x = tiny ? low : x;
    vf n = x * 1.44269504088896341f - 0.5f;
    vi whole = __builtin_convertvector(n, vi);  // towards zero, which rounds numbers below 0
    n = __builtin_convertvector(whole, vf);
    x = x - n * 0.693359375f - n * -2.12194440e-4f;
    vf y = spread(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * x * x + x + 1.0f;
    vf result = y * (vf)((whole + 127) << 23);
    return tiny ? vf{} : result;
}

// 1 / (1 + e^-x)
INLINE vf sigmoid(vf x) {
    vi below = x < 0.0f;
    vf e = power(below ? x : -x);
    return (below ? e : spread(1.0f)) / (1.0f + e);
}

// The sum of n numbers, or of the squares of how far they lie from `middle`.
static float sum_of(const float* x, int64_t n) {
    vf sums = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sums += load(x + i);
    float sum = total(sums);
    for (; i < n; i++) sum += x[i];
    return sum;
}
static float squares_of(const float* x, int64_t n, float middle) {
    vf sums = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf off = load(x + i) - middle;
        sums += off * off;
    }
    float sum = total(sums);
    for (; i < n; i++) sum += (x[i] - middle) * (x[i] - middle);
    return sum;
}

// A row as it enters a product, as floats in `wide`, which has room for it and a vector. For SWIGLU
// it has 2 K numbers, gates first.
template <class W> void enter(const Product& p, const W* x, float* wide) {
    const int64_t K = p.K, given = p.before == SWIGLU ? 2 * K : K;
    for (int64_t i = 0; i < given; i++) wide[i] = number(x[i]);
    if (p.before == LAYER_NORM || p.before == RMS_NORM) {
        const W *scale = (const W*)p.norm_weight, *shift = (const W*)p.norm_bias;
        const float middle = p.before == LAYER_NORM ? sum_of(wide, K) / K : 0;
        const float factor = 1 / std::sqrt(squares_of(wide, K, middle) / K + (float)p.eps);
        for (int64_t i = 0; i < K; i++) wide[i] = (wide[i] - middle) * factor;
        if (scale)
            for (int64_t i = 0; i < K; i++) wide[i] *= number(scale[i]);
        if (shift)
            for (int64_t i = 0; i < K; i++) wide[i] += number(shift[i]);
        return;
    }
    for (int64_t i = 0; i < K; i += LANES) {
        vf v = load(wide + i);
        if (p.before == GELU) v *= sigmoid(1.5957691216057308f * (v + 0.044715f * v * v * v));
        if (p.before == RELU2) {
            v = v < 0.0f ? vf{} : v;  // NaN stays NaN
            v *= v;
        }
        if (p.before == SWIGLU) v *= sigmoid(v) * load(wide + K + i);
        save(wide + i, v);
    }
}

// y (M, N) = before(x) w (N, K)^T + bias, or `onto` plus `scale` times that
template <class W> void linear(const Product& p, int64_t M, int threads) {
    const int64_t N = p.N, K = p.K, row = p.before == SWIGLU ? 2 * K : K;
    const W *x = (const W*)p.x, *w = (const W*)p.weight, *bias = (const W*)p.bias;
    const W* onto = (const W*)p.onto;
    W* y = (W*)p.y;
    // Whether x can be read as it stands.
    const bool plain = !p.before && Weights<W>::step == LANES && depth_of(M, K) == K;
    float* wide = plain ? (float*)x : scratch(0, M * K);
    int64_t block = share(N, DEPTH * sizeof(W), threads);
    int64_t blocks = (N + block - 1) / block;
#pragma omp parallel num_threads(threads)
    {
        if (!plain) {
#pragma omp for schedule(static)
            for (int64_t m = 0; m < M; m++) {
                if (!p.before) {
                    pack<W>(x + m * K, m, M, K, wide);
                    continue;
                }
                float* entered = scratch(2, row + LANES);
                enter<W>(p, x + m * row, entered);
                pack<W>(entered, m, M, K, wide);
            }
        }
        float* sums = scratch(1, M * block);
#pragma omp for schedule(dynamic) nowait
        for (int64_t b = 0; b < blocks; b++) {
            int64_t first = b * block, n = N - first < block ? N - first : block;
            product<W>(wide, M, w + first * K, K, n, K, sums);
            for (int64_t m = 0; m < M; m++) {
                float* from = sums + m * n;
                W* to = y + m * N + first;
                if (bias)
                    for (int64_t i = 0; i < n; i++) from[i] += number(bias[first + i]);
                if (onto)
                    for (int64_t i = 0; i < n; i++)
                        from[i] = number(onto[m * N + first + i]) + p.scale * from[i];
                for (int64_t i = 0; i < n; i++) put(to[i], from[i]);
            }
        }
    }
}

// Products one after the other, three at most. What has no x reads the y of the one before; what has
// no y is not wanted but by the others.
template <class W> void chain(Product* products, int64_t count, int64_t M, int threads) {
    for (int64_t i = 0; i < count; i++) {
        Product& p = products[i];
        if (!p.x) p.x = products[i - 1].y;
        if (p.onto_y_of >= 0) p.onto = products[p.onto_y_of].y;
        if (!p.y) p.y = scratch(4 + i % 2, M * p.N);
        linear<W>(p, M, threads);
    }
}
