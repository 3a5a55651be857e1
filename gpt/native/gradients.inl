// What a training step does besides its large products, forwards and backwards, for one instruction
// set: see all.inl. torch makes each of these of up to ten passes over memory; here they are one or
// two.
//
// Rows are cut into pieces whose number does not depend on the threads, and what is summed over rows
// is summed by piece and then over the pieces, in order: the same numbers on any number of threads.

struct Pieces {
    int64_t rows, each, count;
    explicit Pieces(int64_t M) : rows(M), each(M / 48), count(0) {
        each = each < 32 ? 32 : each;
        count = (M + each - 1) / each;
    }
    int64_t end(int64_t p) const { return (p + 1) * each < rows ? (p + 1) * each : rows; }
};

// A vector's numbers, or as many as are left of a row.
struct Whole {
    METHOD vf get(const float* from) const { return load(from); }
    METHOD void set(float* to, vf value) const { save(to, value); }
};
struct Rest {
    int64_t left;
    METHOD vf get(const float* from) const {
        vf value = {};
        std::memcpy(&value, from, left * 4);
        return value;
    }
    METHOD void set(float* to, vf value) const { std::memcpy(to, &value, left * 4); }
};
template <class F> INLINE void each(int64_t n, F step) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) step(Whole(), i);
    if (i < n) step(Rest{n - i}, i);
}
#define EACH(n) each(n, [&](auto at, int64_t i) __attribute__((always_inline)) {
#define END })

// to[0 … n) = the sum of `count` rows of n numbers
static void add_up(const float* from, int64_t count, int64_t n, float* to) {
    std::memset(to, 0, n * 4);
    for (int64_t p = 0; p < count; p++)
        EACH(n) at.set(to + i, at.get(to + i) + at.get(from + p * n + i)); END;
}

// The sum of a b c.
INLINE float triple(const float* a, const float* b, const float* c, int64_t n) {
    vf sums = {};
    EACH(n) sums += at.get(a + i) * at.get(b + i) * at.get(c + i); END;
    return total(sums);
}

// y = w x f with f = 1 / rms(x). With d = dy w:  dx = f (d - x f^2 mean(d x)),  dw += dy x f
INLINE void unnorm(const float* dy, const float* x, const float* w, float f, int64_t n, float* dx,
                   float* dw) {
    const float pull = f * f * f * triple(dy, x, w, n) / n;
    EACH(n) at.set(dx + i, f * at.get(dy + i) * at.get(w + i) - pull * at.get(x + i)); END;
    if (!dw) return;
    EACH(n) at.set(dw + i, at.get(dw + i) + f * at.get(dy + i) * at.get(x + i)); END;
}

static void norm_forward(const Normed& n) {
    const Pieces pieces(n.M);
    const int64_t C = n.C;
#pragma omp parallel for schedule(static) num_threads(n.threads)
    for (int64_t p = 0; p < pieces.count; p++)
        for (int64_t m = p * pieces.each; m < pieces.end(p); m++) {
            const float *x = n.x + m * C, f = 1 / std::sqrt(squares_of(x, C, 0) / C + n.eps);
            float* y = n.y + m * C;
            EACH(C) at.set(y + i, at.get(x + i) * f * at.get(n.weight + i)); END;
            if (n.factors) n.factors[m] = f;
        }
}

static void norm_backward(const Normed& n) {
    const Pieces pieces(n.M);
    const int64_t C = n.C;
    float* sums = n.dweight ? scratch(4, pieces.count * C) : nullptr;
#pragma omp parallel for schedule(static) num_threads(n.threads)
    for (int64_t p = 0; p < pieces.count; p++) {
        float* own = sums ? sums + p * C : nullptr;
        if (own) std::memset(own, 0, C * 4);
        for (int64_t m = p * pieces.each; m < pieces.end(p); m++)
            unnorm(n.dy + m * C, n.x + m * C, n.weight, n.factors[m], C, n.dx + m * C, own);
    }
    if (n.dweight) add_up(sums, pieces.count, C, n.dweight);
}

// y_t = x_t + sum over j of w_j x_(t - j); `weight` is (C, k), as a module keeps it.
static void conv_forward(const Convolved& c) {
    const int64_t C = c.C, k = c.k;
    const Pieces pieces(c.M);
    float* w = scratch(4, k * C);
    for (int64_t j = 0; j < k; j++)
        for (int64_t i = 0; i < C; i++) w[j * C + i] = c.weight[i * k + j] + (j == 0);
#pragma omp parallel for schedule(static) num_threads(c.threads)
    for (int64_t p = 0; p < pieces.count; p++)
        for (int64_t m = p * pieces.each; m < pieces.end(p); m++) {
            const float* x = c.x + m * C;
            float* y = c.y + m * C;
            const int64_t before = c.before(m), seen = before + 1 < k ? before + 1 : k;
            EACH(C)
                vf sum = {};
                for (int64_t j = 0; j < seen; j++) sum += at.get(w + j * C + i) * at.get(x + i - j * C);
                at.set(y + i, sum);
            END;
        }
}

static void conv_backward(const Convolved& c) {
    const int64_t C = c.C, T = c.T, k = c.k;
    const Pieces pieces(c.M);
    float *w = scratch(4, k * C), *sums = c.dweight ? scratch(5, pieces.count * k * C) : nullptr;
    for (int64_t j = 0; j < k; j++)
        for (int64_t i = 0; i < C; i++) w[j * C + i] = c.weight[i * k + j] + (j == 0);
#pragma omp parallel for schedule(static) num_threads(c.threads)
    for (int64_t p = 0; p < pieces.count; p++) {
        float* own = sums ? sums + p * k * C : nullptr;
        if (own) std::memset(own, 0, k * C * 4);
        for (int64_t m = p * pieces.each; m < pieces.end(p); m++) {
            const float *dy = c.dy + m * C, *x = c.x + m * C;
            if (float* dx = c.dx ? c.dx + m * C : nullptr) {
                int64_t seen = 1;  // by how many, itself the first, until its text ends
                while (seen < k && m % T + seen < T && c.before(m + seen) >= seen) seen++;
                EACH(C)
                    vf sum = {};
                    for (int64_t j = 0; j < seen; j++)
                        sum += at.get(w + j * C + i) * at.get(dy + i + j * C);
                    at.set(dx + i, sum);
                END;
            }
            if (!own) continue;
            const int64_t before = c.before(m), sees = before + 1 < k ? before + 1 : k;
            EACH(C)
                const vf d = at.get(dy + i);
                for (int64_t j = 0; j < sees; j++)
                    at.set(own + j * C + i, at.get(own + j * C + i) + d * at.get(x + i - j * C));
            END;
        }
    }
    if (!c.dweight) return;
    add_up(sums, pieces.count, k * C, w);
    for (int64_t i = 0; i < C; i++)
        for (int64_t j = 0; j < k; j++) c.dweight[i * k + j] = w[j * C + i];
}

// y = max(x, 0)^2; with dy given dy * 2 max(x, 0). NaN stays NaN.
static void square_relu(const float* x, const float* dy, float* y, int64_t count, int threads) {
    const Pieces pieces(count / 64 + 1);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < pieces.count; p++) {
        const int64_t first = p * pieces.each * 64, end = pieces.end(p) * 64;
        const int64_t stop = end < count ? end : count;
        EACH(stop - first)
            vf given = at.get(x + first + i);
            given = given < 0.0f ? vf{} : given;
            at.set(y + first + i, dy ? 2.0f * given * at.get(dy + first + i) : given * given);
        END;
    }
}

// 32 bits that look random, from 32 that need not (Wellons' "lowbias32").
INLINE vu mixed_up(vu x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// y = x, or 0, plus `factor` times those of `branch` that are kept, each with probability 1 - p. Which
// they are follows from the seed and their places, so nobody need remember them.
static void drop(const float* x, const float* branch, float* y, int64_t count, uint64_t seed,
                 float p, float factor, int threads) {
    const Pieces pieces(count / 64 + 1);
    const int32_t least = (int32_t)(p * (1 << 24));
    vu place = {};
    for (int j = 0; j < LANES; j++) place[j] = j;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t piece = 0; piece < pieces.count; piece++) {
        const int64_t first = piece * pieces.each * 64, end = pieces.end(piece) * 64;
        const int64_t stop = end < count ? end : count;
        EACH(stop - first)
            const uint64_t at_all = first + i;
            const vu where = place + (uint32_t)at_all + (uint32_t)(at_all >> 32) * 0x9e3779b9u;
            const vu bits = mixed_up(mixed_up(where + (uint32_t)seed) ^ (uint32_t)(seed >> 32));
            const vf kept = (vi)(bits >> 8) >= least ? at.get(branch + first + i) : vf{};
            at.set(y + first + i, (x ? at.get(x + first + i) : vf{}) + factor * kept);
        END;
    }
}

// Numbers i and i + `other` of a head are pair i, or neighbours are.
INLINE void rotated(float* x, const float* cos, const float* sin, float way, int64_t P, bool mixed) {
    if (mixed)
        for (int64_t i = 0; i < P; i++) {
            const float a = x[2 * i], b = x[2 * i + 1], s = way * sin[i];
            x[2 * i] = a * cos[i] - b * s;
            x[2 * i + 1] = b * cos[i] + a * s;
        }
    else
        EACH(P)
            const vf a = at.get(x + i), b = at.get(x + P + i);
            const vf c = at.get(cos + i), s = way * at.get(sin + i);
            at.set(x + i, a * c - b * s);
            at.set(x + P + i, b * c + a * s);
        END;
}

// Heads of queries, of keys, and of values, apart: the first two normed and turned.
static void turn_forward(const Turned& t) {
    const int64_t D = t.D, P = t.pairs, heads = t.H + t.K, all = heads + t.K;
    const Pieces pieces(t.M);
#pragma omp parallel for schedule(static) num_threads(t.threads)
    for (int64_t p = 0; p < pieces.count; p++)
        for (int64_t m = p * pieces.each; m < pieces.end(p); m++) {
            const float *x = t.rows + m * all * D, *cos = t.cos + m % t.period * P;
            const float* sin = t.sin + m % t.period * P;
            for (int64_t h = 0; h < heads; h++, x += D) {
                float* y = h < t.H ? t.q + (m * t.H + h) * D : t.k + (m * t.K + h - t.H) * D;
                if (const float* w = h < t.H ? t.q_weight : t.k_weight) {
                    const float f = 1 / std::sqrt(squares_of(x, D, 0) / D + t.eps);
                    EACH(D) at.set(y + i, at.get(x + i) * f * at.get(w + i)); END;
                    t.factors[m * heads + h] = f;
                } else {
                    std::memcpy(y, x, D * 4);
                }
                if (P) rotated(y, cos, sin, 1, P, t.interleaved);
            }
            std::memcpy(t.v + m * t.K * D, x, t.K * D * 4);
        }
}

// q, k and v hold gradients here, which are turned back where they are.
static void turn_backward(const Turned& t) {
    const int64_t D = t.D, P = t.pairs, heads = t.H + t.K, all = heads + t.K;
    const Pieces pieces(t.M);
    float* sums = t.dweights ? scratch(4, pieces.count * 2 * D) : nullptr;
#pragma omp parallel for schedule(static) num_threads(t.threads)
    for (int64_t p = 0; p < pieces.count; p++) {
        float *own = sums ? sums + p * 2 * D : nullptr, *wide = scratch(2, D);
        if (own) std::memset(own, 0, 2 * D * 4);
        for (int64_t m = p * pieces.each; m < pieces.end(p); m++) {
            const float *x = t.rows + m * all * D, *cos = t.cos + m % t.period * P;
            const float* sin = t.sin + m % t.period * P;
            float* dx = t.drows + m * all * D;
            for (int64_t h = 0; h < heads; h++, x += D, dx += D) {
                const bool query = h < t.H;
                const float* dy = query ? t.q + (m * t.H + h) * D : t.k + (m * t.K + h - t.H) * D;
                std::memcpy(wide, dy, D * 4);
                if (P) rotated(wide, cos, sin, -1, P, t.interleaved);
                if (const float* w = query ? t.q_weight : t.k_weight)
                    unnorm(wide, x, w, t.factors[m * heads + h], D, dx,
                           own ? own + (query ? 0 : D) : nullptr);
                else
                    std::memcpy(dx, wide, D * 4);
            }
            std::memcpy(dx, t.v + m * t.K * D, t.K * D * 4);
        }
    }
    if (t.dweights) add_up(sums, pieces.count, 2 * D, t.dweights);
}

#undef EACH
#undef END
