// Causal attention of whole sequences and its gradients, for one instruction set: see all.inl.
//
// Some queries at a time against all keys that they see, so no square of scores is ever held (Dao et
// al., arXiv 2205.14135). What the products need lies in a thread's own memory: keys and values once
// as rows and once as columns, queries in rows that end in zeros.
//
//   P = exp(scale Q K^T - lse)        O = P V
//   dP = dO V^T        dS = P (dP - sum over d of dO O) scale
//   dQ = dS K        dK = dS^T Q        dV = P^T dO

INLINE float largest(const float* x, int64_t n) {
    vf found = spread(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const vf next = load(x + i);
        found = next > found ? next : found;
    }
    float most = -INFINITY;
    for (int j = 0; j < LANES; j++) most = found[j] > most ? found[j] : most;
    for (; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
}

// A head's memory. Rows are of `width` numbers, columns and scores of `ld`.
struct Head {
    const Causal& a;
    int64_t width, ld, rows;
    float *keys, *values, *keys_across, *values_across;  // (T, width) and (width, ld)
    float *scores, *slopes;                               // (rows, ld)
    float *q, *out, *dout, *dq;                           // (rows, width)
    float *dkeys, *dvalues;                               // (T + TILE, width)
    float *sums;                                          // (rows)

    explicit Head(const Causal& given) : a(given) {
        width = rounded_up(a.D, PAIR);
        ld = rounded_up(a.T + TILE, PAIR) + 16;  // an odd count of cache lines: no power of two
        rows = a.T > 512 ? 2 * TILE : 48;
        const int64_t whole = (a.T + TILE) * width, across = width * ld, few = rows * width;
        float* at = scratch(0, 4 * whole + 2 * across + 2 * rows * ld + 4 * few + rows);
        auto take = [&](int64_t count) { return std::exchange(at, at + count); };
        keys = take(whole), values = take(whole), dkeys = take(whole), dvalues = take(whole);
        keys_across = take(across), values_across = take(across);
        scores = take(rows * ld), slopes = take(rows * ld);
        q = take(few), out = take(few), dout = take(few), dq = take(few), sums = take(rows);
    }

    // `count` rows of D numbers, `apart` from each other, in rows of `width`; then rows of zeros.
    void gather(const float* from, int64_t apart, int64_t count, int64_t all, float* to) const {
        for (int64_t m = 0; m < all; m++) {
            const int64_t there = m < count ? a.D : 0;
            if (there) std::memcpy(to + m * width, from + m * apart, there * 4);
            std::memset(to + m * width + there, 0, (width - there) * 4);
        }
    }
    void scatter(const float* from, int64_t count, float* to, int64_t apart) const {
        for (int64_t m = 0; m < count; m++) std::memcpy(to + m * apart, from + m * width, a.D * 4);
    }
    void turn_over(const float* from, float* to) const {
        for (int64_t t = 0; t < ld; t += 16)
            for (int64_t d = 0; d < width; d++)
                for (int64_t i = t; i < t + 16 && i < ld; i++)
                    to[d * ld + i] = i < a.T ? from[i * width + d] : 0;
    }

    // Rows of queries times what lies across, for the keys that any of them sees.
    void across(const float* of, const float* b, int64_t first, int64_t count, float* to) const {
        for (int64_t n = 0; n < first + count; n += PAIR)
            for (int64_t m = 0; m < count; m += TILE)
                if (n < first + m + TILE)
                    block<TILE>(of + m * width, width, 1, b + n, ld, a.D, to + m * ld + n, ld, false);
    }

    // Rows of scores times keys or values: a row sees `first` + its number + 1 of them.
    void mixed(const float* scores, const float* of, int64_t first, int64_t count, float* to) const {
        for (int64_t m = 0; m < count; m += TILE) {
            const int64_t seen = first + m + TILE < a.T ? first + m + TILE : a.T;
            for (int64_t k = 0; k < seen; k += DEEP)
                for (int64_t n = 0; n < width; n += PAIR)
                    block<TILE>(scores + m * ld + k, ld, 1, of + k * width + n, width,
                                seen - k < DEEP ? seen - k : DEEP, to + m * width + n, width, k);
        }
    }

    // Columns of scores times rows of queries, added to what is there of each key.
    void added(const float* scores, const float* of, int64_t first, int64_t count, float* to) const {
        for (int64_t j = 0; j < first + count; j += TILE) {
            const int64_t skip = j > first ? (j - first) / TILE * TILE : 0;  // those before see it not
            for (int64_t n = 0; n < width; n += PAIR)
                block<TILE>(scores + skip * ld + j, 1, ld, of + skip * width + n, width,
                            count - skip, to + j * width + n, width, true);
        }
    }

    void attend(int64_t b, int64_t h, int64_t first) {
        const int64_t left = a.T - first < rows ? a.T - first : rows, count = rounded_up(left, TILE);
        gather(a.q + b * a.q_b + first * a.q_t + h * a.q_h, a.q_t, left, count, q);
        across(q, keys_across, first, count, scores);
        for (int64_t m = 0; m < count; m++) {
            float* row = scores + m * ld;
            const int64_t seen = m < left ? first + m + 1 : 0, end = first + rounded_up(m + 1, TILE);
            const float most = a.scale * largest(row, seen);
            vf total_of = {};
            int64_t i = 0;
            for (; i + LANES <= seen; i += LANES) {
                const vf e = power(load(row + i) * a.scale - most);
                save(row + i, e);
                total_of += e;
            }
            float sum = total(total_of);
            if (i < seen) {
                float rest[LANES];
                for (int j = 0; j < LANES; j++)
                    rest[j] = i + j < seen ? row[i + j] * a.scale - most : -INFINITY;
                save(rest, power(load(rest)));
                for (; i < seen; i++) sum += row[i] = rest[i % LANES];
            }
            for (; i < end; i++) row[i] = 0;
            sums[m] = sum;
            if (m < left) a.lse[(b * a.H + h) * a.T + first + m] = most + std::log(sum);
        }
        mixed(scores, values, first, count, out);
        for (int64_t m = 0; m < left; m++)
            for (int64_t d = 0; d < a.D; d++) out[m * width + d] /= sums[m];
        scatter(out, left, a.out + ((b * a.T + first) * a.H + h) * a.D, a.H * a.D);
    }

    void learn(int64_t b, int64_t h, int64_t first) {
        const int64_t left = a.T - first < rows ? a.T - first : rows, count = rounded_up(left, TILE);
        const int64_t at = ((b * a.T + first) * a.H + h) * a.D, apart = a.H * a.D;
        gather(a.q + b * a.q_b + first * a.q_t + h * a.q_h, a.q_t, left, count, q);
        gather(a.dout + at, apart, left, count, dout);
        gather(a.out + at, apart, left, count, out);
        across(q, keys_across, first, count, scores);
        across(dout, values_across, first, count, slopes);
        for (int64_t m = 0; m < count; m++) {
            float *row = scores + m * ld, *slope = slopes + m * ld;
            const int64_t seen = m < left ? first + m + 1 : 0, end = rounded_up(first + count, PAIR);
            float pull = 0;
            for (int64_t d = 0; d < a.D; d++) pull += dout[m * width + d] * out[m * width + d];
            const float lse = m < left ? a.lse[(b * a.H + h) * a.T + first + m] : 0;
            for (int64_t i = 0; i < seen; i += LANES) {
                const vf p = power(load(row + i) * a.scale - lse);
                save(slope + i, p * (load(slope + i) - pull) * a.scale);
                save(row + i, p);
            }
            for (int64_t i = seen; i < end; i++) row[i] = slope[i] = 0;
        }
        mixed(slopes, keys, first, count, dq);
        scatter(dq, left, a.dq + at, apart);
        added(slopes, q, first, count, dkeys);
        added(scores, dout, first, count, dvalues);
    }
};

static void causal(const Causal& a, bool back) {
    const int64_t G = a.H / a.K;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t item = 0; item < a.B * a.K; item++) {
        const int64_t b = item / a.K, k = item % a.K;
        Head head(a);
        head.gather(a.k + b * a.k_b + k * a.k_h, a.k_t, a.T, a.T, head.keys);
        head.gather(a.v + b * a.v_b + k * a.v_h, a.v_t, a.T, a.T, head.values);
        head.turn_over(head.keys, head.keys_across);
        if (back) {
            head.turn_over(head.values, head.values_across);
            std::memset(head.dkeys, 0, (a.T + TILE) * head.width * 4);
            std::memset(head.dvalues, 0, (a.T + TILE) * head.width * 4);
        }
        for (int64_t h = k * G; h < (k + 1) * G; h++)
            for (int64_t first = 0; first < a.T; first += head.rows)
                back ? head.learn(b, h, first) : head.attend(b, h, first);
        if (!back) continue;
        const int64_t at = (b * a.T * a.K + k) * a.D;
        head.scatter(head.dkeys, a.T, a.dk + at, a.K * a.D);
        head.scatter(head.dvalues, a.T, a.dv + at, a.K * a.D);
    }
}
