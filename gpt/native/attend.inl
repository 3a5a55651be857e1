// Attention of few tokens, for one instruction set: see products.inl, which comes before it.

// Heads of queries, then of keys, each normed by its root mean square and turned by its position.
template <class W> void turn(const Turn& t, int64_t M) {
    const int64_t D = t.D, P = t.pairs;
    float* wide = scratch(2, D);
    for (int64_t m = 0; m < M; m++)
        for (int64_t h = 0; h < t.H + t.K; h++) {
            W* x = (W*)t.rows + m * t.row + h * D;
            for (int64_t i = 0; i < D; i++) wide[i] = number(x[i]);
            if (const W* weight = (const W*)(h < t.H ? t.q_weight : t.k_weight)) {
                const float factor = 1 / std::sqrt(squares_of(wide, D, 0) / D + t.eps);
                for (int64_t i = 0; i < D; i++) wide[i] *= factor * number(weight[i]);
            }
            const float *cos = t.cos + m * P, *sin = t.sin + m * P;
            const int64_t step = t.interleaved ? 2 : 1, other = t.interleaved ? 1 : P;
            for (int64_t i = 0; i < P; i++) {
                float &a = wide[i * step], &b = wide[i * step + other];
                const float turned = a * cos[i] - b * sin[i];
                b = b * cos[i] + a * sin[i];
                a = turned;
            }
            for (int64_t i = 0; i < D; i++) put(x[i], wide[i]);
        }
}

// scores[0 … s) to weights that add up to 1.
static void softmax(float* scores, int64_t s) {
    float most = -INFINITY;
    for (int64_t i = 0; i < s; i++) most = scores[i] > most ? scores[i] : most;
    if (!(most > -INFINITY)) most = most == most ? 0 : most;
    vf sum = {};
    int64_t i = 0;
    for (; i + LANES <= s; i += LANES) {
        vf e = power(load(scores + i) - most);
        save(scores + i, e);
        sum += e;
    }
    float all = total(sum);
    if (i < s) {
        float rest[LANES];
        for (int j = 0; j < LANES; j++) rest[j] = i + j < s ? scores[i + j] - most : -INFINITY;
        save(rest, power(load(rest)));
        for (int j = 0; i + j < s; j++) all += scores[i + j] = rest[j];
    }
    float factor = 1 / all;
    for (int64_t j = 0; j < s; j++) scores[j] *= factor;
}

// y[0 … D) += weights[0 … s) times rows of v. Rows of weight 0 are not read: they may hold anything.
template <class W, int N>
INLINE void mix_block(const float* weights, const W* v, int64_t D, int64_t s, float* y) {
    constexpr int step = Weights<W>::step, parts = Weights<W>::parts;
    vf sum[N * parts];
    for (int n = 0; n < N * parts; n++) sum[n] = load(y + n * LANES);
    for (int64_t j = 0; j < s; j++) {
        if (weights[j] == 0) continue;
        vf p = spread(weights[j]);
        for (int n = 0; n < N; n++) {
            Weights<W> row;
            row.read(v + j * D + n * step);
            for (int i = 0; i < parts; i++) sum[n * parts + i] += p * row.part[i];
        }
    }
    for (int n = 0; n < N * parts; n++) save(y + n * LANES, sum[n]);
}

template <class W> void mix(const float* weights, const W* v, int64_t D, int64_t s, float* y) {
    constexpr int step = Weights<W>::step, many = 8 * LANES / step;
    int64_t d = 0;
    for (; d + many * step <= D; d += many * step) mix_block<W, many>(weights, v + d, D, s, y + d);
    for (; d + step <= D; d += step) mix_block<W, 1>(weights, v + d, D, s, y + d);
    for (; d < D; d++)
        for (int64_t j = 0; j < s; j++)
            if (weights[j] != 0) y[d] += weights[j] * number(v[j * D + d]);
}

// The sums of `mix`, which are laid out like `widen`'s, in their own order.
template <class W> void unmix(const float* y, W* to, int64_t D) {
    constexpr int step = Weights<W>::step;
    int64_t d = 0;
    if (step != LANES)
        for (; d + step <= D; d += step)
            for (int j = 0; j < LANES; j++) {
                put(to[d + 2 * j], y[d + j]);
                put(to[d + 2 * j + 1], y[d + LANES + j]);
            }
    for (; d < D; d++) put(to[d], y[d]);
}

// Queries of one sequence that share a key head go through its keys together: row r = i * G + g of
// the products is query i of head k * G + g.
template <class W> void attend(const Attend& a) {
    const W *q = (const W*)a.q, *keys = (const W*)a.keys, *values = (const W*)a.values;
    const int64_t G = a.H / a.K, D = a.D, P = a.page_size, R = a.t * G;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t item = 0; item < a.b * a.K; item++) {
        const int64_t b = item / a.K, k = item % a.K;
        const uint8_t* sees = a.sees ? a.sees + b * a.t * a.s : nullptr;
        auto token = [&](int64_t i) { return a.rows ? a.rows[b * a.t + i] : b * a.t + i; };
        // What lies before the first key that is seen, or behind the last, costs nothing.
        int64_t first = 0, stop = a.s;
        if (sees) {
            auto seen = [&](int64_t at) {
                for (int64_t i = 0; i < a.t; i++)
                    if (sees[i * a.s + at]) return true;
                return false;
            };
            while (stop > 0 && !seen(stop - 1)) stop--;
            while (first < stop && !seen(first)) first++;
        }
        float* wide = scratch(0, R * D);
        float* scores = scratch(1, R * a.s);
        float* sums = scratch(2, D);
        float* page_scores = scratch(3, R * P);
        for (int64_t r = 0; r < R; r++)
            pack<W>(q + token(r / G) * a.q_row + (k * G + r % G) * D, r, R, D, wide);
        auto in_page = [&](int64_t at, int64_t& slot) {
            // Keys from `at` on that lie side by side, and where.
            int64_t place = at + a.skip, left = P - place % P;
            slot = a.pages ? a.pages[b * a.n_pages + place / P] * P + place % P : a.first_slot + at;
            if (!a.pages) left = P;
            return stop - at < left ? stop - at : left;
        };
        int64_t slot = 0;
        for (int64_t at = first, n; at < stop; at += n) {
            n = in_page(at, slot);
            product<W>(wide, R, keys + (k * a.slots + slot) * D, D, n, D, page_scores);
            for (int64_t r = 0; r < R; r++) {
                float* to = scores + r * a.s + at;
                const float* from = page_scores + r * n;
                for (int64_t i = 0; i < n; i++) to[i] = from[i] * a.scale;
                if (a.softcap > 0)
                    for (int64_t i = 0; i < n; i++) to[i] = a.softcap * std::tanh(to[i] / a.softcap);
                if (a.bias) {
                    const float* term =
                        a.bias + b * a.bias_b + (k * G + r % G) * a.bias_h + r / G * a.s + at;
                    for (int64_t i = 0; i < n; i++) to[i] += term[i];
                }
                if (sees) {
                    const uint8_t* own = sees + r / G * a.s + at;
                    for (int64_t i = 0; i < n; i++) to[i] = own[i] ? to[i] : -INFINITY;
                }
            }
        }
        for (int64_t r = 0; r < R; r++) {
            float* weights = scores + r * a.s;
            softmax(weights + first, stop - first);
            for (int64_t d = 0; d < D; d++) sums[d] = 0;
            for (int64_t at = first, n; at < stop; at += n) {
                n = in_page(at, slot);
                mix<W>(weights + at, values + (k * a.slots + slot) * D, D, n, sums);
            }
            unmix<W>(sums, (W*)a.out + token(r / G) * a.H * D + (k * G + r % G) * D, D);
        }
    }
}
