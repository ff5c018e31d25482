// The part of attention's arithmetic that all instruction sets share: rows of queries against one
// tile of keys. The tiles of a context begin at multiples of KEYS, and a row processes them in
// order, so a row's result depends on its own position alone: a decode, any chunk of a prefill and
// any neighbours give the same bits. Within a tile, scores are summed over d in order, the softmax
// is online (running maximum, in powers of 2), and values are added key by key. A masked key's
// weight is exactly 0, so a tile that lies completely before a row's sliding window does not change
// the row.
//
//   Slots: the tile's addresses in the cache
//   -> Rows::load: keys transposed, values contiguous
//   -> Rows::attend: scores, weigh, values
//
// Rows is VecRows (attention_vec.inl) or Bf16Rows (attention_bf16.inl), depending on the
// instruction set.

constexpr int KEYS = 64;  // per tile: its keys and values stay in the L1 cache while all rows pass
// a maximum over nothing: finite, so that a difference of two is not NaN
constexpr float NO_SCORE = -3.4028235e38f;

inline void fetch(const void* p) { __builtin_prefetch(p, 0, 2); }  // into the L2 cache

// Addresses of a tile's keys and values in the cache.
template <typename C>
struct Slots {
    const C* keys[KEYS];
    const C* values[KEYS];
    const float* key_scales[IS_SCALED<C> ? KEYS : 1];
    const float* value_scales[IS_SCALED<C> ? KEYS : 1];
    int count = 0;
};

struct NoFetch {
    template <int BYTES>
    void go_on(int64_t) {}
};

// Prefetches the next tile's rows line by line between the products of the current tile. A core
// handles about two dozen outstanding lines; more would stall its arithmetic. If a tile is computed
// for several heads, each head's products ask for an equal part of the rows, which hold these heads
// side by side.
template <typename C>
struct Fetch {
    static constexpr int LINE = 64, NUMBER = sizeof(C);

    const C* const* rows = nullptr;
    int count = 0, end = 0, row = 0;  // all rows; the end of the current part; the next one
    int64_t row_bytes = 0, at = 0;

    void start(const C* const* from, int num_rows, int64_t row_numbers) {
        rows = from, count = num_rows, end = 0, row = 0, row_bytes = row_numbers * sizeof(C);
        at = 0;
    }
    void allow(int part, int parts) { end = count * (part + 1) / parts; }
    // For iteration `step` of a loop that reads BYTES of its own rows in each.
    template <int BYTES>
    void go_on(int64_t step) {
        if (BYTES < LINE && step % std::max(LINE / BYTES, 1)) return;
        for (int i = 0; i < std::max(BYTES / LINE, 1) && row < end; i++) fetch_line();
    }
    void all() {
        while (row < end) fetch_line();
    }

private:
    void fetch_line() {
        fetch((const char*)rows[row] + at);
        if ((at += LINE) >= row_bytes) at = 0, row++;
    }
};

// Copies a row of values into a tile. size: a multiple of 8; of 16 for integers. A call of memcpy
// would cost more than these few moves.
inline void copy_row(const int8_t* from, int64_t size, float* to) { widen_row(from, size, to); }
inline void copy_row(const int8_t* from, int64_t size, uint16_t* to) { widen_row(from, size, to); }
template <typename T>
inline void copy_row(const T* from, int64_t size, T* to) {
    int64_t i = 0, bytes = size * sizeof(T);
    for (; i + 32 <= bytes; i += 32) Eight::load((const char*)from + i).store((char*)to + i);
    if (i < bytes) std::memcpy((char*)to + i, (const char*)from + i, 16);
}

// 8 keys of `dwords` dwords each (a multiple of 4): put(i, the i-th dword of each).
template <typename Put>
inline void transpose_8(const void* const* keys, int64_t dwords, Put put) {
    for (int64_t i = 0; i < dwords; i += 4) {
        Eight columns[4];
        Eight::transpose(keys, i, columns);
        for (int j = 0; j < 4; j++) put(i + j, columns[j]);
    }
}

// A tile's keys transposed: [dword of head_dim][KEYS] dwords, a dword being two consecutive bf16 or
// one fp32 number. Keys from count on, up to a multiple of 8, are zeros. Those beyond are
// arbitrary, and their scores are masked.
template <typename T, typename C>
void transpose_keys(Slots<C>& slots, int64_t head_dim, T* out) {
    static const C zeros[MAX_HEAD_DIM] = {};
    int padded = (int)round_up(slots.count, 8);
    for (int key = slots.count; key < padded; key++) slots.keys[key] = zeros;
    for (int key = 0; key < padded; key += 8) {
        const void* const* rows = (const void* const*)slots.keys + key;
        uint32_t* columns = (uint32_t*)out + key;
        transpose_8(rows, head_dim * sizeof(C) / 4, [=](int64_t i, Eight dwords) {
            if constexpr (IS_SCALED<C>)
                widen_fours(dwords, (T*)(columns + i * KEYS * sizeof(T)), KEYS);
            else dwords.store(columns + i * KEYS);
        });
    }
}

template <typename T>
bool all_finite(const T* values, int64_t size) {  // size: a multiple of LANES
    Vec sum;                                      // 0, or NaN if a value is not finite
    for (int64_t i = 0; i < size; i += Vec::LANES)
        sum = Vec::fma(Vec::load(values + i), Vec(), sum);
    return sum.sum() == 0;
}

// A tile's scales if the cache is in int8. Products are those of integers; a key's scale multiplies
// its scores, a value's scale its weights.
template <typename C>
struct Scales {
    void load(const Slots<C>&, bool) {}
    static void prefetch(const Slots<C>&, int64_t) {}
    const float* of_keys() const { return nullptr; }
    const float* of_values() const { return nullptr; }
    template <typename W>
    void scale_seen(int, W*, const int*, const int*) const {}
};
template <>
struct Scales<int8_t> {
    alignas(64) float keys[KEYS] = {}, values[KEYS] = {};  // 0 where there is no key
    bool is_finite;

    // offset: from the scales in `following` to those of the head, in floats
    static void prefetch(const Slots<int8_t>& following, int64_t offset) {
        for (int key = 0; key < following.count; key += 8) {
            fetch(following.key_scales[key] + offset);
            fetch(following.value_scales[key] + offset);
        }
    }
    void load(const Slots<int8_t>& slots, bool seen_by_all) {
        for (int key = 0; key < KEYS; key++) {
            keys[key] = key < slots.count ? *slots.key_scales[key] : 0;
            values[key] = key < slots.count ? *slots.value_scales[key] : 0;
        }
        is_finite = seen_by_all || all_finite(values, KEYS);
    }
    const float* of_keys() const { return keys; }
    const float* of_values() const { return is_finite ? values : nullptr; }
    // For tiles for which of_values returns null: 0 * NaN is not 0, so only the weights of visible
    // values are scaled.
    template <typename W>
    void scale_seen(int rows, W* weights, const int* hidden, const int* visible) const {
        if (is_finite) return;
        for (int r = 0; r < rows; r++)
            for (int key = hidden[r]; key < visible[r]; key++)
                put(weights + r * KEYS + key,
                    Number<W>::get(weights[r * KEYS + key]) * values[key]);
    }
};

// Which positions a token sees besides its own, and with which soft-cap.
struct VisibleRange {
    // number of visible positions; larger than any context without a sliding window
    int64_t window;
    float cap;  // of logits in powers of 2; 0: none

    int64_t first(int64_t position) const { return std::max<int64_t>(position + 1 - window, 0); }
};

// A row's token: its position, and the last position that it sees.
struct Place {
    int64_t position, last;
};

// The keys of the tile that each row sees: from hidden on, before visible.
inline void see(const VisibleRange& range, const Place* places, int rows, int64_t tile_start,
                int* hidden, int* visible) {
    for (int r = 0; r < rows; r++) {
        visible[r] =
            (int)std::min<int64_t>(std::max<int64_t>(places[r].last + 1 - tile_start, 0), KEYS);
        hidden[r] = (int)std::min<int64_t>(
            std::max<int64_t>(range.first(places[r].position) - tile_start, 0), visible[r]);
    }
}

inline void cap_scores(int rows, float* scores, int num_keys, float cap) {
    for (int r = 0; r < rows; r++)
        for (float* s = scores + r * KEYS; s < scores + r * KEYS + num_keys; s += Vec::LANES)
            (Vec(cap) * tanh(Vec::load(s) * Vec(1.0f / cap))).store(s);
}

// A row's softmax so far, as floats in memory: its maximum (the first of LANES), LANES partial sums
// of its weights, its sums of values.
struct Running {
    static constexpr int64_t TOTAL = Vec::LANES, VALUES = 2 * Vec::LANES;
    static void reset(float* row, int64_t size) {
        std::memset(row, 0, size * sizeof(float));
        row[0] = NO_SCORE;
    }
    // Joins a later piece of the same row's context to the earlier ones.
    static void join(float* row, const float* later, int64_t size) {
        float maximum = std::max(row[0], later[0]);
        Vec keep = exp2_of_nonpositive(Vec(row[0] - maximum)),
            take = exp2_of_nonpositive(Vec(later[0] - maximum));
        row[0] = maximum;
        for (int64_t i = TOTAL; i < size; i += Vec::LANES)
            Vec::fma(Vec::load(later + i), take, Vec::load(row + i) * keep).store(row + i);
    }
    // Sums of values over the sum of weights. Adding 0 makes a negative zero positive, so that the
    // result does not show whether a masked key's 0 * value was added.
    static void divide(float* row, int64_t size) {
        multiply(row, size, 1.0f / Vec::load(row + TOTAL).sum());
    }
    // The same with one more weight in the sum. Its score, in powers of 2, may be larger than the
    // row's maximum.
    static void divide_with_sink(float* row, int64_t size, float sink) {
        const float maximum = std::max(row[0], sink);
        const float keep = exp2_of_nonpositive(Vec(row[0] - maximum)).largest(),
                    added = exp2_of_nonpositive(Vec(sink - maximum)).largest();
        multiply(row, size, keep / std::fma(Vec::load(row + TOTAL).sum(), keep, added));
    }

private:
    static void multiply(float* row, int64_t size, float by) {
        const Vec factor(by);
        for (int64_t i = VALUES; i < size; i += Vec::LANES)
            Vec::fma(Vec::load(row + i), factor, Vec()).store(row + i);
    }
};

// Replaces scores by powers of 2 relative to their row's maximum, and adds them to `total` as
// stored.
template <typename W>
struct Powers;
template <>
struct Powers<float> {
    static constexpr int SIZE = Vec::LANES;
    static Vec store(const float* scores, Vec maximum, Vec total, float* to) {
        Vec power = exp2_of_nonpositive(Vec::load(scores) - maximum);
        power.store(to);
        return total + power;
    }
};
#ifdef QUIRE_BF16
// 2**x for x <= 0 to 3e-6, which suffices for bf16. The coefficients are a fit of least relative
// error over [0, 1), exact at 0.
inline Vec exp2_for_bf16(Vec x) {
    Vec r = x.fraction(), p(1.34265188e-2f);
    p = Vec::fma(p, r, Vec(5.22427398e-2f));
    p = Vec::fma(p, r, Vec(2.41280081e-1f));
    p = Vec::fma(p, r, Vec(6.93044860e-1f));
    p = Vec::fma(p, r, Vec(1.0f));
    return Vec::scale_by_floor(p, x);
}

template <>
struct Powers<uint16_t> {
    static constexpr int SIZE = 2 * Vec::LANES;
    static Vec store(const float* scores, Vec maximum, Vec total, uint16_t* to) {
        Vec::store_flushed(exp2_for_bf16(Vec::load(scores) - maximum),
                           exp2_for_bf16(Vec::load(scores + Vec::LANES) - maximum), to);
        constexpr uint16_t ONES[] = {0x3f80, 0x3f80};
        return DotBf16::add(total, DotBf16::weights(to, 0), ONES);
    }
};
#endif

// Turns scores [rows, KEYS] of at most LANES rows into weights: powers of 2 relative to the row's
// maximum, 0 where masked, rounded to W, summed as rounded, then multiplied by their values' scales
// unless null. Weights may overwrite the scores. decay [LANES]: the factors of the rows' sums so
// far.
template <typename W>
inline void weigh(int rows, float* scores, const int* hidden, const int* visible, int num_keys,
                  const float* scales, W* weights, float* running, int64_t running_row,
                  float* decay) {
    int end = (int)round_up(num_keys, Powers<W>::SIZE);
    Vec totals[Vec::LANES];
    alignas(64) float change[Vec::LANES] = {};
    // all maxima first, so that a row's powers do not wait for its own maximum
    for (int r = 0; r < rows; r++) {
        float *s = scores + r * KEYS, &maximum = running[r * running_row];
        for (int key = 0; key < hidden[r]; key++) s[key] = -INFINITY;
        for (int key = visible[r]; key < end; key++) s[key] = -INFINITY;
        Vec most(maximum);
        // operand order matters: a NaN is skipped
        for (int key = 0; key < end; key += Vec::LANES) most = Vec::max(Vec::load(s + key), most);
        const float largest = most.largest();
        change[r] = maximum - largest;
        maximum = largest;
    }
    for (int r = 0; r < rows; r++) {
        const float* s = scores + r * KEYS;
        const Vec maximum(running[r * running_row]);
        Vec total;
        W* to = weights + r * KEYS;
        for (int key = 0; key < end; key += Powers<W>::SIZE)
            total = Powers<W>::store(s + key, maximum, total, to + key);
        for (int key = 0; scales && key < end; key += Vec::LANES)
            (Vec::load(to + key) * Vec::load(scales + key)).store(to + key);
        totals[r] = total;
    }
    exp2_of_nonpositive(Vec::load(change)).store(decay);
    for (int r = 0; r < rows; r++) {
        float* total = running + r * running_row + Running::TOTAL;
        Vec::fma(Vec::load(total), Vec(decay[r]), totals[r]).store(total);
    }
}
