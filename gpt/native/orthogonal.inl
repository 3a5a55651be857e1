// Muon's iteration for a matrix, for one instruction set: see all.inl.
//
// Matrices are worked on tall, y (N, M) with N >= M: neither y^T y nor y P then needs a transposed
// copy. All have rows of `ld` numbers, an odd count of cache lines: a column of rows a power of two
// apart would have few places in L1. What lies beyond the M columns, or the rows, is computed along
// with them and never enters a sum of theirs.

constexpr int64_t SHORT = TILE * 2 / 3;         // for what is left of the rows; still busy enough
constexpr int64_t SQUARE = 16;         // rows of what is transposed that L1 holds both ways

typedef float four __attribute__((vector_size(16)));
typedef float four_at __attribute__((vector_size(16), aligned(4), may_alias));
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t places __attribute__((vector_size(16)));
#define PICK(a, b, ...) __builtin_shuffle(a, b, places{__VA_ARGS__})
#endif

// factor times from (rows, columns), or its transpose; in squares, unless rows stay rows.
static void copy(const float* from, int64_t from_ld, int64_t rows, int64_t columns, float* to,
                 int64_t to_ld, bool turned, float factor) {
    if (!turned) {
        for (int64_t m = 0; m < rows; m++)
            for (int64_t n = 0; n < columns; n++)
                to[m * to_ld + n] = factor * from[m * from_ld + n];
        return;
    }
    for (int64_t i = 0; i < rows; i += SQUARE)
        for (int64_t j = 0; j < columns; j += SQUARE)
            for (int64_t m = i; m < rows && m < i + SQUARE; m++)
                for (int64_t n = j; n < columns && n < j + SQUARE; n++)
                    to[n * to_ld + m] = factor * from[m * from_ld + n];
}

struct Iteration {
    const Quintic& q;
    int64_t N, M, ld;

    // c (rows, M) = factor times a b, of b (depth, M). Of what is symmetric, only the blocks that
    // are not above the diagonal.
    void multiply(const float* a, int64_t row, int64_t step, const float* b, int64_t rows,
                  int64_t depth, float* c, bool symmetric, float factor = 1) const {
        for (int64_t k = 0; k < depth; k += DEEP) {
            const int64_t deep = depth - k < DEEP ? depth - k : DEEP;
            for (int64_t n = 0; n < M; n += PAIR)
                for (int64_t m = symmetric ? n / TILE * TILE : 0; m < rows;) {
                    const float *left = a + m * row + k * step, *right = b + k * ld + n;
                    float* to = c + m * ld + n;
                    const int64_t rest = rows - m;
                    const bool high = rest % TILE == 0 || rest > 2 * SHORT;
                    if (high)
                        block<TILE>(left, row, step, right, ld, deep, to, ld, k, factor);
                    else
                        block<SHORT>(left, row, step, right, ld, deep, to, ld, k, factor);
                    m += high ? TILE : SHORT;
                }
        }
        if (symmetric) mirror(c);
    }

    // What is below the diagonal to where it is missing above.
    void mirror(float* c) const {
        for (int64_t m = 0; m < M; m += 4)
            for (int64_t n = 0; n <= m; n += 4) {
                four rows[4];
                for (int64_t i = 0; i < 4; i++) rows[i] = *(const four_at*)(c + (m + i) * ld + n);
                const four even = PICK(rows[0], rows[2], 0, 4, 1, 5);
                const four odd = PICK(rows[1], rows[3], 0, 4, 1, 5);
                const four late_even = PICK(rows[0], rows[2], 2, 6, 3, 7);
                const four late_odd = PICK(rows[1], rows[3], 2, 6, 3, 7);
                const four columns[4] = {
                    PICK(even, odd, 0, 4, 1, 5), PICK(even, odd, 2, 6, 3, 7),
                    PICK(late_even, late_odd, 0, 4, 1, 5), PICK(late_even, late_odd, 2, 6, 3, 7)};
                for (int64_t i = 0; i < 4; i++) *(four_at*)(c + (n + i) * ld + m) = columns[i];
            }
    }

    // y^T y
    void be_gram(const float* y, float* gram) const { multiply(y, 1, ld, y, M, N, gram, true); }

    // Of symmetric ones that commute.
    void be_product(const float* one, const float* two, float* to, float factor = 1) const {
        multiply(one, ld, 1, two, M, M, to, true, factor);
    }

    void times(const float* y, const float* factor, float* to) const {
        multiply(y, ld, 1, factor, N, M, to, false);
    }

    void add(float* to, float number) const {
        for (int64_t m = 0; m < M; m++) to[m * (ld + 1)] += number;
    }

    // a + b gram + c gram^2; gram itself is shifted.
    void be_polynomial(float* gram, float* poly) const {
        add(gram, q.shift);
        be_product(gram, gram, poly, q.square);
        add(poly, q.rest);
    }
};

// Rows over the roots of their running means of squares. Returns what gives y the size that it had.
static float evened(float* y, const Iteration& o, float* squares, float beta2) {
    const float least = std::numeric_limits<float>::min();
    double before = 0, after = 0;
    for (int64_t n = 0; n < o.N; n++) {
        float* row = y + n * o.ld;
        const float sum = squares_of(row, o.M, 0);
        squares[n] += (1 - beta2) * (sum / o.M - squares[n]);
        const float mean = squares[n] < least ? least : squares[n], factor = 1 / std::sqrt(mean);
        for (int64_t m = 0; m < o.M; m++) row[m] *= factor;
        before += sum;
        after += (double)sum / mean;
    }
    return std::sqrt(before / (after < least ? least : after));
}

// What gpt/training/muon.py does with a matrix in a step, from its gradient to its weights.
static void muon(const Matrix& x, const Quintic& q) {
    const bool stands = x.rows >= x.columns;
    const int64_t N = stands ? x.rows : x.columns, M = stands ? x.columns : x.rows;
    const int64_t ld = rounded_up(M, 32) + 16, tall = (N + TILE) * ld, flat = (M + TILE) * ld;
    const int64_t room = 2 * tall + 4 * flat, count = x.rows * x.columns;
    float *y = scratch(0, room, room * 4 > 1 << 19), *other = y + tall;
    float *gram = other + tall, *poly = gram + flat, *factor = poly + flat, *spare = factor + flat;
    const Iteration o{q, N, M, ld};

    for (int64_t i = 0; i < count; i++) {
        x.mean[i] += (1 - x.momentum) * (x.grad[i] - x.mean[i]);
        // Nesterov's: the newest gradient counts once more.
        other[i] = x.grad[i] + x.momentum * (x.mean[i] - x.grad[i]);
    }
    const float norm = std::sqrt(squares_of(other, count, 0));
    copy(other, x.columns, x.rows, x.columns, y, ld, !stands, 1 / (norm < q.floor ? q.floor : norm));
    // Each turn multiplies y by a polynomial P of y^T y, and so y^T y by P twice. If y is longer
    // than wide, it is less work to multiply all P first.
    if (7 * N < 8 * M) {
        for (int i = 0; i < q.iterations; i++) {
            o.be_gram(y, gram);
            o.be_polynomial(gram, poly);
            o.times(y, poly, other);
            std::swap(y, other);
        }
    } else {
        o.be_gram(y, gram);
        for (int i = 0; i < q.iterations; i++) {
            o.be_polynomial(gram, poly);
            if (i + 1 < q.iterations) {
                o.add(gram, -q.shift);
                o.be_product(poly, gram, spare);
                o.be_product(spare, poly, gram);
            }
            if (i) o.be_product(poly, factor, spare);
            std::swap(factor, i ? spare : poly);
        }
        o.times(y, factor, other);
        std::swap(y, other);
    }
    const float factor_of_all = x.squares ? evened(y, o, x.squares, x.beta2) : 1;
    copy(y, ld, N, M, other, x.columns, !stands, x.rate * factor_of_all);
    for (int64_t i = 0; i < count; i++) x.weight[i] = x.keep * x.weight[i] - other[i];
}
#undef PICK
