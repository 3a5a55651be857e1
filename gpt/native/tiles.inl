// Products whose factors lie in caches: as many sums as there are registers for, two vectors wide.

constexpr int64_t TILE = LANES == 16 ? 12 : 6;  // rows whose sums, two vectors each, fill registers
constexpr int64_t PAIR = 2 * LANES;
constexpr int64_t DEEP = 4096 / PAIR;  // rows of which L1 holds a pair of vectors each

// c (HEIGHT, PAIR) = or += factor times the sums over k of a(m, k) b(k, n), where a(m, k) stands at
// a[m * row + k * step].
template <int64_t HEIGHT>
static void block(const float* a, int64_t row, int64_t step, const float* b, int64_t ldb,
                  int64_t depth, float* c, int64_t ldc, bool more, float factor = 1) {
    vf left[HEIGHT] = {}, right[HEIGHT] = {};
    for (int64_t k = 0; k < depth; k++) {
        const vf one = load(b + k * ldb), two = load(b + k * ldb + LANES);
        for (int64_t m = 0; m < HEIGHT; m++) {
            const vf own = spread(a[m * row + k * step]);
            left[m] += own * one;
            right[m] += own * two;
        }
    }
    for (int64_t m = 0; m < HEIGHT; m++) {
        float* to = c + m * ldc;
        save(to, more ? load(to) + factor * left[m] : factor * left[m]);
        to += LANES;
        save(to, more ? load(to) + factor * right[m] : factor * right[m]);
    }
}
