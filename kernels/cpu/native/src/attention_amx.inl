// Attention's products in AMX tiles of bf16, up to 16 rows at once. Both products cover all KEYS,
// including masked ones.
#include "tiles_amx.h"

struct TileProducts {
    using T = uint16_t;
    static constexpr int ROWS = 16, TILE_K = 32, TILE_N = 16;
    static constexpr bool ALL_KEYS = true;
    int configured = 0;  // rows that the processor's tiles are configured for

    ~TileProducts() {
        if (configured) release_tiles();
    }

    static void set_query(const T* from, int64_t depth, int64_t row, int64_t, T* block) {
        std::memcpy(block + row * depth, from, depth * sizeof(T));
    }

    // Tiles 0 to 3: scores of 16 keys each; 4: queries; 6 and 7: keys.
    template <typename F>
    void score(int rows, const T* block, const T* keys, int64_t depth, int, float scale,
               const float* key_scales, float* scores, F& fetch) {
        constexpr int64_t ROW = KEYS * 4, BLOCK = TILE_N * 2;
        configure(rows);
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
        fetch.all();
        for (int i = 0; i < rows * KEYS; i += Vec::LANES) {
            Vec own = key_scales ? Vec::load(key_scales + i % KEYS) * Vec(scale) : Vec(scale);
            (Vec::load(scores + i) * own).store(scores + i);
        }
    }

    // Tiles 0 and 1: sums of 16 columns each; 4: weights; 6 and 7: values.
    template <typename F>
    void add_values(int rows, const T* weights, const T* values, int64_t depth, int,
                    const float* decay, float* sums, int64_t running_row, F& fetch) {
        configure(rows);
        fetch.all();
        for (int r = 0; r < rows; r++)
            if (decay[r] != 1)
                for (float* at = sums + r * running_row; at < sums + r * running_row + depth;
                     at += Vec::LANES)
                    (Vec::load(at) * Vec(decay[r])).store(at);
        for (int64_t d = 0; d < depth; d += 2 * TILE_N) {
            load_tile<0>(sums + d, running_row * 4),
                load_tile<1>(sums + d + TILE_N, running_row * 4);
            for (int key = 0; key < KEYS; key += TILE_K) {
                load_tile<4>(weights + key, KEYS * 2);
                load_tile<6>(values + key * depth + 2 * d, depth * 4), dot_tiles<0, 4, 6>();
                load_tile<7>(values + key * depth + 2 * (d + TILE_N), depth * 4),
                    dot_tiles<1, 4, 7>();
            }
            store_tile<0>(sums + d, running_row * 4),
                store_tile<1>(sums + d + TILE_N, running_row * 4);
        }
    }

private:
    void configure(int rows) {
        if (rows != configured) configure_tiles(rows);
        configured = rows;
    }
};
