// Rows of queries against a tile in AMX tiles of bf16: 16 rows at once, as many as there are otherwise. Scores are fp32 sums of exact
// products; weights are rounded to bf16 (and summed up so), whatever the number of rows. Both products always go over all KEYS.
#include "tiles_amx.h"

template <typename C>
struct AmxRows {
    using T = uint16_t;
    static constexpr int ROWS = 16, TILE_K = 32, TILE_N = 16;

    const int64_t head_dim, depth;  // depth: head_dim up to a multiple of TILE_K, zeros behind
    const float scale;
    const Sight sight;
    T* q;       // [row][depth]
    T* keys;    // transposed: [depth / 2][KEYS] pairs
    T* values;  // [KEYS / 2][depth] pairs of keys
    Scales<C> scales;
    Fetch<C> next_keys, next_values;
    int64_t start, configured = 0;  // configured: rows that the processor's tiles have now
    bool is_finite;

    static int64_t value_row_of(int64_t head_dim) { return round_up(head_dim, TILE_K); }
    static size_t bytes(int64_t head_dim, int64_t max_rows) { return (max_rows + 2 * KEYS) * value_row_of(head_dim) * sizeof(T); }
    AmxRows(int64_t head_dim, double scale, Sight sight, int64_t max_rows, char* memory)
        : head_dim(head_dim), depth(value_row_of(head_dim)), scale((float)scale), sight(sight), q((T*)memory), keys(q + max_rows * depth),
          values(keys + KEYS * depth) {
        std::memset(memory, 0, bytes(head_dim, max_rows));
    }
    ~AmxRows() {
        if (configured) release_tiles();
    }

    void set_query(int64_t row, int64_t, const T* from) {
        if constexpr (!IS_SCALED<C>) {
            std::memcpy(q + row * depth, from, head_dim * sizeof(T));
        } else {
            alignas(64) float numbers[MAX_HEAD_DIM];
            copy_numbers(from, numbers, head_dim);
            hadamard(numbers, head_dim);
            for (int64_t d = 0; d < head_dim; d += Vec::LANES) Vec::load(numbers + d).store(q + row * depth + d);
        }
    }

    void load(Slots<C>& slots, const Slots<C>& following, int64_t tile_start, bool seen_by_all) {
        static const C zeros[MAX_HEAD_DIM] = {};
        start = tile_start;
        next_keys.start(following.keys, following.count, head_dim);
        next_values.start(following.values, following.count, head_dim);
        transpose_keys(slots, head_dim, keys);
        for (int key = slots.count; key < KEYS; key++) slots.values[key] = zeros;
        for (int key = 0; key < KEYS; key += 2) pair_values(slots.values[key], slots.values[key + 1], values + key * depth);
        scales.load(slots, following, seen_by_all);
        is_finite = IS_SCALED<C> || seen_by_all || all_finite(values, KEYS * depth);
    }

    void attend(int64_t num_rows, const int64_t* positions, float* running, int64_t running_row) {
        for (int64_t row = 0; row < num_rows; row += ROWS)
            attend_block((int)std::min<int64_t>(ROWS, num_rows - row), q + row * depth, positions + row, running + row * running_row, running_row);
    }

    void store(const float* row, T* out) const {
        T padded[MAX_HEAD_DIM + TILE_K];
        for (int64_t d = 0; d < head_dim; d += Vec::LANES) Vec::load(row + Running::VALUES + d).store(padded + d);
        std::memcpy(out, padded, head_dim * sizeof(T));
    }

private:
    void pair_values(const int8_t* first, const int8_t* second, T* out) const {
        T widened[2][MAX_HEAD_DIM];
        widen_row(first, head_dim, widened[0]);
        widen_row(second, head_dim, widened[1]);
        pair_values(widened[0], widened[1], out);
    }
    void pair_values(const T* first, const T* second, T* out) const {
        for (int64_t d = 0; d < head_dim; d += 8) {
            __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(first + d)));
            __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(second + d)));
            _mm256_storeu_si256((__m256i*)(out + 2 * d), _mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
        }
    }

    void configure(int rows) {
        if (rows != configured) configure_tiles(rows);
        configured = rows;
    }

    void attend_block(int rows, const T* block, const int64_t* positions, float* running, int64_t running_row) {
        alignas(64) float scores[ROWS * KEYS], decay[Vec::LANES];
        alignas(64) T weights[ROWS * KEYS];
        int hidden[ROWS], visible[ROWS];
        see(sight, positions, rows, start, hidden, visible);
        if (visible[rows - 1] == hidden[0]) return;
        configure(rows);
        score(block, scores);
        next_keys.all();
        for (int i = 0; i < rows * KEYS; i += Vec::LANES) {
            Vec own = IS_SCALED<C> ? Vec::load(scales.of_keys() + i % KEYS) * Vec(scale) : Vec(scale);
            (Vec::load(scores + i) * own).store(scores + i);
        }
        if (sight.cap) cap_scores(rows, scores, KEYS, sight.cap);
        weigh(rows, scores, hidden, visible, KEYS, scales.of_values(), weights, running, running_row, decay);
        scales.scale_seen(rows, weights, hidden, visible);
        next_values.all();
        float* sums = running + Running::VALUES;
        for (int r = 0; r < rows; r++)
            if (decay[r] != 1)
                for (float* at = sums + r * running_row; at < sums + r * running_row + depth; at += Vec::LANES)
                    (Vec::load(at) * Vec(decay[r])).store(at);
        if (is_finite || (visible[0] == visible[rows - 1] && hidden[rows - 1] == 0)) add_values(weights, values, sums, running_row);
        else add_values_row_by_row(rows, weights, hidden, visible, sums, running_row);
    }

    // Tiles 0 to 3: scores of 16 keys each; 4: queries; 6 and 7: keys.
    void score(const T* block, float* scores) const {
        constexpr int64_t ROW = KEYS * 4, BLOCK = TILE_N * 2;
        zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
        for (int64_t d = 0; d < depth; d += TILE_K) {
            const T* at = keys + d * KEYS;
            load_tile<4>(block + d, depth * 2);
            load_tile<6>(at, ROW), dot_tiles<0, 4, 6>();
            load_tile<7>(at + BLOCK, ROW), dot_tiles<1, 4, 7>();
            load_tile<6>(at + 2 * BLOCK, ROW), dot_tiles<2, 4, 6>();
            load_tile<7>(at + 3 * BLOCK, ROW), dot_tiles<3, 4, 7>();
        }
        store_tile<0>(scores, ROW), store_tile<1>(scores + TILE_N, ROW);
        store_tile<2>(scores + 2 * TILE_N, ROW), store_tile<3>(scores + 3 * TILE_N, ROW);
    }

    // Tiles 0 and 1: sums of 16 columns each; 4: weights; 6 and 7: values.
    void add_values(const T* weights, const T* from, float* sums, int64_t running_row) const {
        for (int64_t d = 0; d < depth; d += 2 * TILE_N) {
            load_tile<0>(sums + d, running_row * 4), load_tile<1>(sums + d + TILE_N, running_row * 4);
            for (int key = 0; key < KEYS; key += TILE_K) {
                load_tile<4>(weights + key, KEYS * 2);
                load_tile<6>(from + key * depth + 2 * d, depth * 4), dot_tiles<0, 4, 6>();
                load_tile<7>(from + key * depth + 2 * (d + TILE_N), depth * 4), dot_tiles<1, 4, 7>();
            }
            store_tile<0>(sums + d, running_row * 4), store_tile<1>(sums + d + TILE_N, running_row * 4);
        }
    }

    // 0 * NaN is no 0: a row must not meet a value that it does not see.
    void add_values_row_by_row(int rows, const T* weights, const int* hidden, const int* visible, float* sums, int64_t running_row) {
        T seen[KEYS * MAX_HEAD_DIM];
        configure(1);
        for (int r = 0; r < rows; r++) {
            std::memcpy(seen, values, KEYS * depth * sizeof(T));
            for (int key = 0; key < KEYS; key++)
                if (key < hidden[r] || key >= visible[r])
                    for (int64_t d = 0; d < depth; d++) seen[(key / 2 * depth + d) * 2 + key % 2] = 0;
            add_values(weights + r * KEYS, seen, sums + r * running_row, running_row);
        }
    }
};
