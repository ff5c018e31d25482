// Rows of queries against a tile in products of bf16, for processors that multiply pairs of bf16.
// Scores are fp32 sums of exact products; weights are rounded to bf16, and their sum is that of the
// rounded weights. Products is the form of an instruction set: DotProducts (attention_dot.inl) or
// TileProducts (attention_amx.inl).

template <typename C, typename Products>
struct Bf16Rows {
    using T = uint16_t;
    static constexpr int ROWS = Products::ROWS;

    // depth and value_depth: the sizes rounded up to a multiple of 32, padded with zeros
    const int64_t head_dim, value_dim, depth, value_depth;
    const float scale;
    const VisibleRange range;
    T* q;       // in the layout of Products, `depth` numbers per row
    T* keys;    // transposed: [depth / 2][KEYS] pairs
    T* values;  // [KEYS / 2][value_depth] pairs of keys
    Scales<C> scales;
    Fetch<C> next_keys, next_values;
    int64_t start;
    bool is_finite;
    Products products;

    static int64_t value_row_of(int64_t value_dim) { return round_up(value_dim, 32); }
    static size_t bytes(int64_t head_dim, int64_t value_dim, int64_t max_rows) {
        const int64_t keys_and_rows = (max_rows + KEYS) * round_up(head_dim, 32);
        return (keys_and_rows + KEYS * value_row_of(value_dim)) * sizeof(T);
    }
    Bf16Rows(int64_t head_dim, int64_t value_dim, double scale, VisibleRange range,
             int64_t max_rows, char* memory)
        : head_dim(head_dim),
          value_dim(value_dim),
          depth(round_up(head_dim, 32)),
          value_depth(value_row_of(value_dim)),
          scale((float)scale),
          range(range),
          q((T*)memory),
          keys(q + max_rows * depth),
          values(keys + KEYS * depth) {
        std::memset(memory, 0, bytes(head_dim, value_dim, max_rows));
    }

    // row: of the num_rows rows of a KV head, which begin at row `begin`.
    void set_query(int64_t begin, int64_t row, int64_t num_rows, const T* from) {
        T padded[MAX_HEAD_DIM] = {};
        if constexpr (!IS_SCALED<C>) {
            std::memcpy(padded, from, head_dim * sizeof(T));
        } else {
            alignas(64) float numbers[MAX_HEAD_DIM];
            copy_numbers(from, numbers, head_dim);
            hadamard(numbers, head_dim);
            for (int64_t d = 0; d < head_dim; d += Vec::LANES)
                Vec::load(numbers + d).store(padded + d);
        }
        const int64_t first = row / ROWS * ROWS;
        Products::set_query(padded, depth, row - first, std::min<int64_t>(ROWS, num_rows - first),
                            q + (begin + first) * depth);
    }

    void load(Slots<C>& slots, int64_t tile_start, bool seen_by_all) {
        static const C zeros[MAX_HEAD_DIM] = {};
        start = tile_start;
        transpose_keys(slots, head_dim, keys);
        for (int key = slots.count; key < KEYS; key++) slots.values[key] = zeros;
        for (int key = 0; key < KEYS; key += 2)
            pair_values(slots.values[key], slots.values[key + 1], values + key * value_depth);
        scales.load(slots, seen_by_all);
        is_finite = IS_SCALED<C> || seen_by_all || all_finite(values, KEYS * value_depth);
    }

    // The rows of one KV head. places [num_rows], ascending; running: the rows' Running,
    // running_row floats apart.
    void attend(int64_t begin, int64_t num_rows, const Place* places, float* running,
                int64_t running_row) {
        for (int64_t row = 0; row < num_rows; row += ROWS)
            attend_block((int)std::min<int64_t>(ROWS, num_rows - row), q + (begin + row) * depth,
                         places + row, running + row * running_row, running_row);
    }

    // Stores a finished row, after Running::divide.
    void store(const float* row, T* out) const {
        T padded[MAX_HEAD_DIM + 32];
        for (int64_t d = 0; d < value_dim; d += Vec::LANES)
            Vec::load(row + Running::VALUES + d).store(padded + d);
        std::memcpy(out, padded, value_dim * sizeof(T));
    }

private:
    void pair_values(const int8_t* first, const int8_t* second, T* out) const {
        T widened[2][MAX_HEAD_DIM];
        widen_row(first, value_dim, widened[0]);
        widen_row(second, value_dim, widened[1]);
        pair_values(widened[0], widened[1], out);
    }
    void pair_values(const T* first, const T* second, T* out) const {
        for (int64_t d = 0; d < value_dim; d += 8) interleave_8(first + d, second + d, out + 2 * d);
    }

    void attend_block(int rows, const T* block, const Place* places, float* running,
                      int64_t running_row) {
        alignas(64) float scores[ROWS * KEYS], decay[Vec::LANES];
        alignas(64) T weights[ROWS * KEYS];
        int hidden[ROWS], visible[ROWS];
        see(range, places, rows, start, hidden, visible);
        const int num_keys = Products::ALL_KEYS ? KEYS : visible[rows - 1];
        if (visible[rows - 1] == hidden[0]) return;
        products.score(rows, block, keys, depth, num_keys, scale, scales.of_keys(), scores,
                       next_keys);
        if (range.cap) cap_scores(rows, scores, num_keys, range.cap);
        weigh(rows, scores, hidden, visible, num_keys, scales.of_values(), weights, running,
              running_row, decay);
        scales.scale_seen(rows, weights, hidden, visible);
        float* sums = running + Running::VALUES;
        if (is_finite || (visible[0] == visible[rows - 1] && hidden[rows - 1] == 0)) {
            products.add_values(rows, weights, values, value_depth, num_keys, decay, sums,
                                running_row, next_values);
            return;
        }
        // 0 * NaN is not 0: a row must not multiply a value that it does not see
        for (int r = 0; r < rows; r++) {
            T seen[KEYS * MAX_HEAD_DIM];
            std::memcpy(seen, values, KEYS * value_depth * sizeof(T));
            for (int key = 0; key < KEYS; key++)
                if (key < hidden[r] || key >= visible[r])
                    for (int64_t d = 0; d < value_depth; d++)
                        seen[(key / 2 * value_depth + d) * 2 + key % 2] = 0;
            products.add_values(1, weights + r * KEYS, seen, value_depth, num_keys, decay + r,
                                sums + r * running_row, running_row, next_values);
        }
    }
};
