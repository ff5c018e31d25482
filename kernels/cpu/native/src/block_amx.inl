// The innermost block of a bf16 linear layer in AMX tiles: up to two tiles of 16 rows of x times
// two panels. A single row uses the same tiles with fewer rows, so its bits do not depend on the
// number of rows.
#include "tiles_amx.h"

struct Bf16Block {
    using X = uint16_t;
    using Weight = uint16_t;
    static constexpr int MAX_ROWS = 32;
    // a piece of two panels and 32 rows stays in the L1 cache
    static constexpr int64_t DEPTH = 448;
    // not a power of two, whose lines would share a cache set
    static constexpr int64_t STRIDE = DEPTH + 32;
    static constexpr int64_t CHUNK_ROWS = 256;  // rows that use each weight loaded from memory
    static constexpr int64_t AHEAD = 1024;      // bytes of each panel
    static constexpr int64_t TILE_K = 32, TILE_PAIRS = 16, TILE_SIZE = TILE_K * PANEL;

    const uint16_t* weights;
    int64_t panel_size;
    int64_t configured = 0;  // rows that the tiles are configured for

    explicit Bf16Block(const Linear& call)
        : weights((const uint16_t*)call.weight),
          panel_size(round_up(call.in_features, 2) * PANEL) {}
    ~Bf16Block() {
        if (configured) release_tiles();
    }

    static int64_t group(int64_t rows, int64_t, int64_t) { return rows <= MAX_ROWS ? 4 : 16; }
    static constexpr int panels_at_once(int64_t) { return 2; }

    const uint16_t* at(int64_t panel, int64_t begin) const {
        return weights + panel * panel_size + begin * PANEL;
    }
    void multiply(int64_t rows, int64_t panels, const uint16_t* x, int64_t panel, int64_t begin,
                  int64_t size, float* sums, int64_t sums_row, const uint16_t*, int64_t, int64_t) {
        if (rows != configured) configure_tiles(rows);
        configured = rows;
        const uint16_t* from = at(panel, begin);
        if (rows > 16 && panels == 2) run<2, 2>(x, from, size, sums, sums_row, begin == 0);
        else if (rows > 16) run<2, 1>(x, from, size, sums, sums_row, begin == 0);
        else if (panels == 2) run<1, 2>(x, from, size, sums, sums_row, begin == 0);
        else run<1, 1>(x, from, size, sums, sums_row, begin == 0);
    }

private:
    // Tiles 0 to 3 hold the sums, 4 and 5 x, 6 and 7 weights.
    template <int HALVES, int PANELS>
    void run(const uint16_t* x, const uint16_t* from, int64_t size, float* sums, int64_t sums_row,
             bool first) {
        constexpr int64_t SUMS_BELOW = 16, X_BELOW = 16 * STRIDE;
        const int64_t below = SUMS_BELOW * sums_row, row_bytes = sums_row * 4;
        if (first) {
            zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
        } else {
            load_tile<0>(sums, row_bytes);
            if (PANELS == 2) load_tile<1>(sums + PANEL, row_bytes);
            if (HALVES == 2) load_tile<2>(sums + below, row_bytes);
            if (HALVES == 2 && PANELS == 2) load_tile<3>(sums + below + PANEL, row_bytes);
        }
        for (int64_t k = 0; k < size; k += TILE_K, x += TILE_K, from += TILE_SIZE) {
            load_weights<6>(from, size - k);
            load_tile<4>(x, STRIDE * 2);
            dot_tiles<0, 4, 6>();
            if (PANELS == 2) load_weights<7>(from + panel_size, size - k);
            if (PANELS == 2) dot_tiles<1, 4, 7>();
            if (HALVES == 2) load_tile<5>(x + X_BELOW, STRIDE * 2);
            if (HALVES == 2) dot_tiles<2, 5, 6>();
            if (HALVES == 2 && PANELS == 2) dot_tiles<3, 5, 7>();
        }
        store_tile<0>(sums, row_bytes);
        if (PANELS == 2) store_tile<1>(sums + PANEL, row_bytes);
        if (HALVES == 2) store_tile<2>(sums + below, row_bytes);
        if (HALVES == 2 && PANELS == 2) store_tile<3>(sums + below + PANEL, row_bytes);
    }

    // The last tile of a panel may be short: its missing pairs are zeros, not the next panel's.
    template <int TILE>
    static void load_weights(const uint16_t* from, int64_t left) {
        for (int line = 0; line < TILE_PAIRS; line++)
            __builtin_prefetch((const char*)(from + line * 32) + AHEAD);
        if (left >= TILE_K) return load_tile<TILE>(from, 64);
        alignas(64) uint16_t whole[TILE_SIZE] = {};
        std::memcpy(whole, from, round_up(left, 2) * PANEL * sizeof(uint16_t));
        load_tile<TILE>(whole, 64);
    }
};
