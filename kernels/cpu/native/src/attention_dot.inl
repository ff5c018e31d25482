// Attention's products in vectors of fp32 sums, to which an instruction adds a pair of bf16
// products: sums of some rows times some vectors, in registers.

struct DotProducts {
    using T = uint16_t;
    static constexpr int ROWS = MAX_SUMS / 2;  // leaves registers for 2 vectors
    static constexpr bool ALL_KEYS = false;

    // Queries: [depth / 2][rows] pairs
    static void set_query(const T* from, int64_t depth, int64_t row, int64_t rows, T* block) {
        for (int64_t d = 0; d < depth; d += 2)
            std::memcpy(block + d * rows + 2 * row, from + d, 2 * sizeof(T));
    }

    template <typename F>
    void score(int rows, const T* block, const T* keys, int64_t depth, int num_keys, float scale,
               const float* key_scales, float* scores, F& fetch) {
        score_exactly<ROWS>(rows, block, keys, depth, num_keys, scale, key_scales, scores, fetch);
    }

    template <typename F>
    void add_values(int rows, const T* weights, const T* values, int64_t depth, int num_keys,
                    const float* decay, float* sums, int64_t running_row, F& fetch) {
        add_exactly<ROWS>(rows, weights, values, depth, num_keys, decay, sums, running_row, fetch);
    }

private:
    static constexpr int vectors_beside(int rows) { return rows * 4 <= MAX_SUMS - 4 ? 4 : 2; }

    template <int R, typename F>
    void score_exactly(int rows, const T* q, const T* keys, int64_t depth, int num_keys,
                       float scale, const float* key_scales, float* scores, F& fetch) {
        if constexpr (R > 1)
            if (rows != R)
                return score_exactly<R - 1>(rows, q, keys, depth, num_keys, scale, key_scales,
                                            scores, fetch);
        constexpr int N = vectors_beside(R), STEP = N * Vec::LANES;
        for (int key = 0; key < num_keys; key += STEP)
            score_keys<R, N>(q, keys + 2 * key, depth, scale,
                             key_scales ? key_scales + key : nullptr, scores + key, fetch);
    }

    // scores [R, KEYS] of N vectors of keys
    template <int R, int N, typename F>
    static __attribute__((noinline)) void score_keys(const T* q, const T* keys, int64_t depth,
                                                     float scale, const float* key_scales,
                                                     float* scores, F& fetch) {
        Vec sums[R][N];
        F ahead = fetch;  // in registers
        for (int64_t d = 0; d < depth; d += 2, q += 2 * R, keys += 2 * KEYS) {
            ahead.template go_on<2 * N * Vec::LANES * F::NUMBER>(d / 2);
            add_pairs<R, N, 2>(q, keys, sums);
        }
        fetch = ahead;
        for (int n = 0; n < N; n++) {
            Vec own = key_scales ? Vec::load(key_scales + n * Vec::LANES) * Vec(scale) : Vec(scale);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
                (sums[r][n] * own).store(scores + r * KEYS + n * Vec::LANES);
        }
    }

    template <int R, typename F>
    void add_exactly(int rows, const T* weights, const T* values, int64_t depth, int num_keys,
                     const float* decay, float* sums, int64_t running_row, F& fetch) {
        if constexpr (R > 1)
            if (rows != R)
                return add_exactly<R - 1>(rows, weights, values, depth, num_keys, decay, sums,
                                          running_row, fetch);
        constexpr int N = vectors_beside(R), STEP = N * Vec::LANES;
        int64_t d = 0;
        for (; d + STEP <= depth; d += STEP)
            add_columns<R, N>(weights, values + 2 * d, depth, num_keys, decay, sums + d,
                              running_row, fetch);
        if (d < depth)
            add_columns<R, 2>(weights, values + 2 * d, depth, num_keys, decay, sums + d,
                              running_row, fetch);
    }

    // sums [R rows of N vectors, running_row apart] = sums * decay + weights [R, KEYS] times the
    // values of the first num_keys
    template <int R, int N, typename F>
    static __attribute__((noinline)) void add_columns(const T* weights, const T* values,
                                                      int64_t depth, int num_keys,
                                                      const float* decay, float* sums,
                                                      int64_t running_row, F& fetch) {
        Vec sum[R][N];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                sum[r][n] = Vec::load(sums + r * running_row + n * Vec::LANES) * Vec(decay[r]);
        F ahead = fetch;
        for (int key = 0; key < num_keys; key += 2, values += 2 * depth, weights += 2) {
            ahead.template go_on<2 * N * Vec::LANES * F::NUMBER>(key / 2);
            add_pairs<R, N, KEYS>(weights, values, sum);
        }
        fetch = ahead;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sum[r][n].store(sums + r * running_row + n * Vec::LANES);
    }

    // sums [R][N] += a pair of each of R rows, APART numbers apart, times N vectors of pairs
    template <int R, int N, int APART>
    static void add_pairs(const T* rows, const T* vectors, Vec (&sums)[R][N]) {
        decltype(DotBf16::weights(vectors, 0)) held[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) held[n] = DotBf16::weights(vectors + 2 * n * Vec::LANES, 0);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                sums[r][n] = settled(DotBf16::add(sums[r][n], held[n], rows + r * APART));
    }
};
