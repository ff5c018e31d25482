// Attention's arithmetic: rows of queries against one tile of keys. The tiles of a context begin at positions that are multiples of
// KEYS, and a row meets them in order, so what a row computes depends on its own position alone: a decode, any chunk of a prefill and
// any neighbours give it the same bits. Within a tile: scores summed over d in order, softmax online (running maximum, in powers of 2),
// values added key by key. A masked key's weight is exactly 0.

constexpr int KEYS = 64;              // of a tile: its keys and values stay in the first cache while all rows pass
constexpr int ROWS = 5;               // whose sums are held in registers at once, times 2 vectors: with 6 of them compilers run out of 16 registers
constexpr int64_t MAX_HEAD_DIM = 256;
constexpr auto FETCH = _MM_HINT_T1;
constexpr float NO_SCORE = -3.4028235e38f;  // a maximum over nothing: finite, so that differences of two are no NaN

// A tile's keys lie transposed, as [dword of head_dim][KEYS] dwords: a dword is two consecutive bf16 or one fp32 number.
// LANES pairs of consecutive numbers, the first and the second of each; `apart`: from one vector to the other, where T is fp32.
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

// bytes: a multiple of 16. A call of memcpy costs more than these few moves.
inline void copy_row(const void* from, void* to, int64_t bytes) {
    int64_t i = 0;
    for (; i + 32 <= bytes; i += 32) _mm256_storeu_si256((__m256i*)((char*)to + i), _mm256_loadu_si256((const __m256i*)((const char*)from + i)));
    if (i < bytes) _mm_storeu_si128((__m128i*)((char*)to + i), _mm_loadu_si128((const __m128i*)((const char*)from + i)));
}

// 8 keys of `dwords` dwords each (a multiple of 4) -> columns of the transposed tile.
inline void transpose_8(const void* const* keys, int64_t dwords, uint32_t* out) {
    for (int64_t i = 0; i < dwords; i += 4, out += 4 * KEYS) {
        __m256i x[4];
        for (int j = 0; j < 4; j++) {
            __m128i low = _mm_loadu_si128((const __m128i*)((const uint32_t*)keys[j] + i));
            __m128i high = _mm_loadu_si128((const __m128i*)((const uint32_t*)keys[j + 4] + i));
            x[j] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
        }
        __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
        __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
        _mm256_storeu_si256((__m256i*)(out), _mm256_unpacklo_epi64(a, c));
        _mm256_storeu_si256((__m256i*)(out + KEYS), _mm256_unpackhi_epi64(a, c));
        _mm256_storeu_si256((__m256i*)(out + 2 * KEYS), _mm256_unpacklo_epi64(b, d));
        _mm256_storeu_si256((__m256i*)(out + 3 * KEYS), _mm256_unpackhi_epi64(b, d));
    }
}

// sums [R][N] += x [R] times N vectors, which load(n) gives. The smaller side is held in registers while the other streams through.
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
            for (int r = 0; r < R; r++) sums[r][n] = Vec::fma(held[r], y, sums[r][n]);
        }
    } else {
        Vec held[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) held[n] = load(n);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Vec y(x[r * APART]);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) sums[r][n] = Vec::fma(y, held[n], sums[r][n]);
        }
    }
}

// scores [R, KEYS] of N vectors of keys; q [head_dim][R], keys: at the first of them in the transposed tile.
template <typename T, int R, int N>
inline void score_keys(const float* q, const T* keys, int64_t head_dim, float* scores) {
    constexpr int STEP = Vec::LANES * Pairs<T>::WIDTH;
    Vec sums[R][N];
    for (int64_t d = 0; d < head_dim; d += 2, q += 2 * R, keys += 2 * KEYS) {
        add_products<R, N, 1>(q, [&](int n) { return Pairs<T>::first(keys + n * STEP, KEYS); }, sums);
        add_products<R, N, 1>(q + R, [&](int n) { return Pairs<T>::second(keys + n * STEP, KEYS); }, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[r][n].store(scores + r * KEYS + n * Vec::LANES);
}

// sums [R rows of N vectors, `row` apart] = sums * decay + weights [R, KEYS] times the first num_keys values. N is even: pairs.
template <typename T, int R, int N>
inline void add_values(const float* weights, const T* values, int64_t value_row, int num_keys, const float* decay, float* sums, int64_t row) {
    Vec sum[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[r][n] = Vec::load(sums + r * row + n * Vec::LANES) * Vec(decay[r]);
    for (int key = 0; key < num_keys; key++, values += value_row, weights++)
        add_products<R, N, KEYS>(weights, [&](int n) {
            const T* pair = values + n / 2 * 2 * Vec::LANES;
            return n % 2 ? Pairs<T>::second(pair, Vec::LANES) : Pairs<T>::first(pair, Vec::LANES);
        }, sum);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sum[r][n].store(sums + r * row + n * Vec::LANES);
}

// A row's softmax so far, as floats in memory: its maximum (the first of LANES), LANES partial sums of its weights, its sums of values.
struct Running {
    static constexpr int64_t TOTAL = Vec::LANES, VALUES = 2 * Vec::LANES;
    static void reset(float* row, int64_t size) {
        std::memset(row, 0, size * sizeof(float));
        row[0] = NO_SCORE;
    }
    // A later piece of the same row's context joins the earlier ones.
    static void join(float* row, const float* later, int64_t size) {
        float maximum = std::max(row[0], later[0]);
        Vec keep = exp2_of_nonpositive(Vec(row[0] - maximum)), take = exp2_of_nonpositive(Vec(later[0] - maximum));
        row[0] = maximum;
        for (int64_t i = TOTAL; i < size; i += Vec::LANES) Vec::fma(Vec::load(later + i), take, Vec::load(row + i) * keep).store(row + i);
    }
    // The attended row. Adding 0 makes a negative zero positive: whether a masked key's 0 * value was added must not be seen.
    template <typename T>
    static void finish(const float* row, T* out, int64_t head_dim) {
        T padded[MAX_HEAD_DIM + 2 * Vec::LANES];
        Vec factor(1.0f / Vec::load(row + TOTAL).sum());
        for (int64_t d = 0; d < head_dim; d += 2 * Vec::LANES) {
            const float* sums = row + VALUES + d;
            Pairs<T>::store(Vec::fma(Vec::load(sums), factor, Vec()), Vec::fma(Vec::load(sums + Vec::LANES), factor, Vec()), padded + d);
        }
        std::memcpy(out, padded, head_dim * sizeof(T));
    }
};

// Where a tile's keys and values lie in the cache.
template <typename T>
struct Slots {
    const T* keys[KEYS];
    const T* values[KEYS];
    int count = 0;
};

// One tile of one KV head, and what of it may be seen.
template <typename T>
struct Tile {
    const T* keys;         // transposed
    const T* values;       // [KEYS, value_row], zeros from head_dim on
    int64_t head_dim;
    int64_t value_row;     // head_dim up to a multiple of 2 * LANES
    int64_t start;         // position of the first key
    bool has_only_finite_values;
    const Slots<T>* next;  // what is fetched into the caches meanwhile; null: nothing

    // A part of that: all of some keys, some columns of all values.
    void fetch_keys(int first, int count) const {
        for (int key = first; key < std::min(first + count, next->count); key++)
            for (int64_t d = 0; d < head_dim; d += 64 / sizeof(T)) _mm_prefetch((const char*)(next->keys[key] + d), FETCH);
    }
    void fetch_values(int64_t first, int64_t count) const {
        for (int64_t d = round_up(first, 64 / sizeof(T)); d < std::min(first + count, head_dim); d += 64 / sizeof(T))
            for (int key = 0; key < next->count; key++) _mm_prefetch((const char*)(next->values[key] + d), FETCH);
    }
};

// Weights of R rows: scores become powers of 2 over the row's maximum, 0 where masked. decay: what the rows' sums so far are worth.
template <int R>
inline void weigh(float* scores, const int* visible, int num_keys, float* running, int64_t row, float* decay) {
    int end = (num_keys + Vec::LANES - 1) / Vec::LANES * Vec::LANES;
    alignas(64) float change[Vec::LANES] = {};
    for (int r = 0; r < R; r++) {
        float* s = scores + r * KEYS;
        for (int key = visible[r]; key < end; key++) s[key] = -INFINITY;
        Vec largest(running[r * row]);
        for (int key = 0; key < end; key += Vec::LANES) largest = Vec::max(Vec::load(s + key), largest);  // in this order: NaN is passed over
        float maximum = largest.largest();
        change[r] = running[r * row] - maximum;
        running[r * row] = maximum;
        Vec total;
        for (int key = 0; key < end; key += Vec::LANES) {
            Vec weight = exp2_of_nonpositive(Vec::load(s + key) - Vec(maximum));
            weight.store(s + key);
            total = total + weight;
        }
        total.store(decay + r * Vec::LANES);
    }
    Vec factor = exp2_of_nonpositive(Vec::load(change));
    factor.store(change);
    for (int r = 0; r < R; r++) {
        float* totals = running + r * row + Running::TOTAL;
        Vec::fma(Vec::load(totals), Vec(change[r]), Vec::load(decay + r * Vec::LANES)).store(totals);
    }
    std::memcpy(decay, change, sizeof change);
}

template <typename T, int R>
void add_all_values(const Tile<T>& tile, const float* weights, int num_keys, const float* decay, float* running, int64_t row) {
    constexpr int N = R == 1 ? 8 : R <= 3 ? 4 : 2;  // vectors at once: enough independent sums to keep the multipliers busy
    int64_t d = 0;
    for (; d + N * Vec::LANES <= tile.value_row; d += N * Vec::LANES) {
        if (tile.next) tile.fetch_values(d, N * Vec::LANES);
        add_values<T, R, N>(weights, tile.values + d, tile.value_row, num_keys, decay, running + Running::VALUES + d, row);
    }
    for (; d < tile.value_row; d += 2 * Vec::LANES)
        add_values<T, R, 2>(weights, tile.values + d, tile.value_row, num_keys, decay, running + Running::VALUES + d, row);
}

// R rows pass a tile. q [head_dim][R]; positions [R], ascending; running: the rows' Running, `row` floats apart.
template <typename T, int R>
void attend_rows(const Tile<T>& tile, const float* q, const int64_t* positions, float* running, int64_t row) {
    constexpr int N = std::min(R == 1 ? 8 : R == 2 ? 4 : 2, KEYS / Vec::LANES);
    alignas(64) float scores[R * KEYS], decay[R * Vec::LANES];
    int visible[R];
    for (int r = 0; r < R; r++) visible[r] = (int)std::min<int64_t>(std::max<int64_t>(positions[r] + 1 - tile.start, 0), KEYS);
    int num_keys = visible[R - 1];
    if (num_keys == 0) return;
    for (int key = 0; key < num_keys; key += N * Vec::LANES) {
        if (tile.next) tile.fetch_keys(key, N * Vec::LANES);
        score_keys<T, R, N>(q, tile.keys + key * Pairs<T>::WIDTH, tile.head_dim, scores + key);
    }
    weigh<R>(scores, visible, num_keys, running, row, decay);
    if (tile.has_only_finite_values || visible[0] == num_keys) {
        add_all_values<T, R>(tile, scores, num_keys, decay, running, row);
    } else {  // 0 * NaN is no 0: a row must not meet a later token's value
        for (int r = 0; r < R; r++) add_all_values<T, 1>(tile, scores + r * KEYS, visible[r], decay + r, running + r * row, row);
    }
}
