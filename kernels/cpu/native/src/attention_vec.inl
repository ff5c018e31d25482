// Rows of queries against a tile in vectors of fp32: sums of some rows times some vectors of keys,
// or of columns of values, in registers. A tile holds numbers as T, the cache as C: T, or int8.

// LANES pairs of consecutive numbers, the first and the second of each. apart: distance between the
// two vectors if T is fp32.
template <typename T>
struct Pairs;
template <>
struct Pairs<uint16_t> {
    static constexpr int WIDTH = 2;  // numbers per dword
    static Vec first(const uint16_t* p, int) { return Vec::first_of_pairs(p); }
    static Vec second(const uint16_t* p, int) { return Vec::second_of_pairs(p); }
    static void store(Vec first, Vec second, uint16_t* p) { Vec::store_pairs(first, second, p); }
};
template <>
struct Pairs<float> {
    static constexpr int WIDTH = 1;
    static Vec first(const float* p, int) { return Vec::load(p); }
    static Vec second(const float* p, int apart) { return Vec::load(p + apart); }
    static void store(Vec first, Vec second, float* p) {
        first.store(p);
        second.store(p + Vec::LANES);
    }
};

// sums [R][N] += x [R] times N vectors, returned by load(n). The smaller side is held in registers
// while the other is streamed. Without `settled` GCC loads the vectors of two such sums at once and
// spills a sum, and a prompt's attention takes a fifth longer.
template <int R, int N, int APART, typename Load>
inline void add_products(const float* x, Load load, Vec (&sums)[R][N]) {
    if (R < N) {
        Vec held[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) held[r] = Vec(x[r * APART]);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            Vec y = load(n);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r][n] = settled(Vec::fma(held[r], y, sums[r][n]));
        }
    } else {
        Vec held[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) held[n] = settled(load(n));
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Vec y(x[r * APART]);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[r][n] = settled(Vec::fma(y, held[n], sums[r][n]));
        }
    }
}

// scores [R, KEYS] of N vectors of keys, times their scales unless null; q [head_dim][R]; keys
// points to the first of them in the transposed tile.
template <typename T, typename C, int R, int N, typename F>
inline void score_keys(const float* q, const T* keys, int64_t head_dim, const float* scales,
                       float* scores, F& fetch) {
    constexpr int STEP = Vec::LANES * Pairs<T>::WIDTH;
    Vec sums[R][N];
    F ahead = fetch;  // in registers
    for (int64_t d = 0; d < head_dim; d += 2, q += 2 * R, keys += 2 * KEYS) {
        ahead.template go_on<2 * N * Vec::LANES * sizeof(C)>(d / 2);
        add_products<R, N, 1>(
            q, [&](int n) { return Pairs<T>::first(keys + n * STEP, KEYS); }, sums);
        add_products<R, N, 1>(
            q + R, [&](int n) { return Pairs<T>::second(keys + n * STEP, KEYS); }, sums);
    }
    fetch = ahead;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            (scales ? sums[r][n] * Vec::load(scales + n * Vec::LANES) : sums[r][n])
                .store(scores + r * KEYS + n * Vec::LANES);
}

// sums [R rows of N vectors, `row` apart] = sums * decay + weights [R, KEYS] times the first
// num_keys values. N is even: pairs.
template <typename T, typename C, int R, int N, typename F>
inline void add_values(const float* weights, const T* values, int64_t value_row, int num_keys,
                       const float* decay, float* sums, int64_t row, F& fetch) {
    Vec sum[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++)
            sum[r][n] = Vec::load(sums + r * row + n * Vec::LANES) * Vec(decay[r]);
    F ahead = fetch;
    for (int key = 0; key < num_keys; key++, values += value_row, weights++) {
        ahead.template go_on<N * Vec::LANES * sizeof(C)>(key);
        add_products<R, N, KEYS>(
            weights,
            [&](int n) {
                const T* pair = values + n / 2 * 2 * Vec::LANES;
                return n % 2 ? Pairs<T>::second(pair, Vec::LANES)
                             : Pairs<T>::first(pair, Vec::LANES);
            },
            sum);
    }
    fetch = ahead;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[r][n].store(sums + r * row + n * Vec::LANES);
}

template <typename T, typename C>
struct VecRows {
    // rows whose sums are held at once, times 2 vectors; with 6, compilers run out of 16 registers
    static constexpr int ROWS = 5;

    const int64_t head_dim, value_dim, value_row;
    const float scale;
    const VisibleRange range;
    float* q;   // [head_dim][size] for each block of ROWS rows; the last has size <= ROWS
    T* keys;    // transposed
    T* values;  // [KEYS, value_row]; what is past value_dim is not read
    Scales<C> scales;
    Fetch<C> next_keys, next_values;
    int64_t start;
    bool is_finite;

    static int64_t value_row_of(int64_t value_dim) { return round_up(value_dim, 2 * Vec::LANES); }
    static size_t bytes(int64_t head_dim, int64_t value_dim, int64_t max_rows) {
        return max_rows * head_dim * sizeof(float) +
               KEYS * (head_dim + value_row_of(value_dim)) * sizeof(T);
    }
    VecRows(int64_t head_dim, int64_t value_dim, double scale, VisibleRange range, int64_t max_rows,
            char* memory)
        : head_dim(head_dim),
          value_dim(value_dim),
          value_row(value_row_of(value_dim)),
          scale((float)scale),
          range(range),
          q((float*)memory),
          keys((T*)(q + max_rows * head_dim)),
          values(keys + KEYS * head_dim) {
        std::memset(values, 0, KEYS * value_row * sizeof(T));
    }

    // row: of the num_rows rows of a KV head, which begin at row `begin`.
    void set_query(int64_t begin, int64_t row, int64_t num_rows, const T* from) {
        int64_t first = row / ROWS * ROWS, size = std::min<int64_t>(ROWS, num_rows - first);
        float* to = q + (begin + first) * head_dim + row % ROWS;
        alignas(64) float numbers[MAX_HEAD_DIM];
        copy_numbers(from, numbers, head_dim);
        if constexpr (IS_SCALED<C>) hadamard(numbers, head_dim);
        for (int64_t d = 0; d < head_dim; d++) to[d * size] = numbers[d] * scale;
    }

    // Loads the tile at `start`. seen_by_all is false if some row sees fewer of its keys than
    // another.
    void load(Slots<C>& slots, int64_t tile_start, bool seen_by_all) {
        start = tile_start;
        transpose_keys(slots, head_dim, keys);
        for (int key = 0; key < slots.count; key++)
            copy_row(slots.values[key], round_up(value_dim, 8), values + key * value_row);
        scales.load(slots, seen_by_all);
        is_finite = IS_SCALED<C> || seen_by_all || all_finite(values, slots.count * value_row);
    }

    // The rows of one KV head. places [num_rows], ascending; running: the rows' Running,
    // running_row floats apart.
    void attend(int64_t begin, int64_t num_rows, const Place* places, float* running,
                int64_t running_row) {
        const float* queries = q + begin * head_dim;
        attend_rows(num_rows, queries, places, running, running_row, next_keys, next_values);
        NoFetch none;
        for (int64_t row = ROWS; row < num_rows; row += ROWS)
            attend_rows(num_rows - row, queries + row * head_dim, places + row,
                        running + row * running_row, running_row, none, none);
    }

    // Stores a finished row, after Running::divide.
    void store(const float* row, T* out) const {
        T padded[MAX_HEAD_DIM + 2 * Vec::LANES];
        for (int64_t d = 0; d < value_dim; d += 2 * Vec::LANES)
            Pairs<T>::store(Vec::load(row + Running::VALUES + d),
                            Vec::load(row + Running::VALUES + d + Vec::LANES), padded + d);
        std::memcpy(out, padded, value_dim * sizeof(T));
    }

private:
    // As many of num_rows as are processed at once; F: Fetch, or NoFetch.
    template <typename F>
    void attend_rows(int64_t num_rows, const float* block, const Place* places, float* running,
                     int64_t running_row, F& keys, F& values) {
        switch (num_rows) {
            case 1:
                return attend_block<1>(block, places, running, running_row, keys, values);
            case 2:
                return attend_block<2>(block, places, running, running_row, keys, values);
            case 3:
                return attend_block<3>(block, places, running, running_row, keys, values);
            case 4:
                return attend_block<4>(block, places, running, running_row, keys, values);
            default:
                attend_block<ROWS>(block, places, running, running_row, keys, values);
        }
    }

    // Not inlined: as one function, the loops are compiled to slower code.
    template <int R, typename F>
    __attribute__((noinline)) void attend_block(const float* block, const Place* places,
                                                float* running, int64_t running_row, F& fetch_keys,
                                                F& fetch_values) {
        constexpr int N = std::min(R == 1 ? 8 : R == 2 ? 4 : 2, KEYS / Vec::LANES);
        alignas(64) float scores[R * KEYS], decay[Vec::LANES];
        int hidden[R], visible[R];
        see(range, places, R, start, hidden, visible);
        int num_keys = visible[R - 1];
        if (num_keys == hidden[0]) return;
        for (int key = 0; key < num_keys; key += N * Vec::LANES) {
            const float* key_scales = IS_SCALED<C> ? scales.of_keys() + key : nullptr;
            score_keys<T, C, R, N>(block, keys + key * Pairs<T>::WIDTH, head_dim, key_scales,
                                   scores + key, fetch_keys);
        }
        if (range.cap) cap_scores(R, scores, num_keys, range.cap);
        weigh(R, scores, hidden, visible, num_keys, scales.of_values(), scores, running,
              running_row, decay);
        scales.scale_seen(R, scores, hidden, visible);
        if (is_finite || (visible[0] == num_keys && hidden[R - 1] == 0)) {
            add_all_values<R>(scores, values, num_keys, decay, running, running_row, fetch_values);
        } else {  // 0 * NaN is not 0: a row must not multiply a value that it does not see
            for (int r = 0; r < R; r++) {
                float *weights = scores + r * KEYS + hidden[r], *row = running + r * running_row;
                add_all_values<1>(weights, values + hidden[r] * value_row, visible[r] - hidden[r],
                                  decay + r, row, running_row, fetch_values);
            }
        }
    }

    template <int R, typename F>
    void add_all_values(const float* weights, const T* values, int num_keys, const float* decay,
                        float* running, int64_t running_row, F& fetch) {
        // vectors at once: enough independent sums to keep the multipliers busy
        constexpr int N = R == 1 ? 8 : R <= 3 ? 4 : 2;
        float* sums = running + Running::VALUES;
        int64_t d = 0;
        for (; d + N * Vec::LANES <= value_row; d += N * Vec::LANES)
            add_values<T, C, R, N>(weights, values + d, value_row, num_keys, decay, sums + d,
                                   running_row, fetch);
        for (; d < value_row; d += 2 * Vec::LANES)
            add_values<T, C, R, 2>(weights, values + d, value_row, num_keys, decay, sums + d,
                                   running_row, fetch);
    }
};
