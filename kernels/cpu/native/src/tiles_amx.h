// AMX tile instructions. In assembly, because GCC's intrinsics accept no template argument as tile
// number and do not declare their memory accesses.
#pragma once

#ifdef QUIRE_EMULATED
inline void load_tile_config(const void* config) { _tile_loadconfig(config); }
inline void release_tiles() { _tile_release(); }
template <int TILE>
void zero_tile() {
    _tile_zero(TILE);
}
template <int TILE>
void load_tile(const void* from, int64_t row_bytes) {
    _tile_loadd(TILE, from, row_bytes);
}
template <int TILE>
void store_tile(void* to, int64_t row_bytes) {
    _tile_stored(TILE, to, row_bytes);
}
template <int SUMS, int X, int WEIGHTS>
void dot_tiles() {
    _tile_dpbf16ps(SUMS, X, WEIGHTS);
}
template <int SUMS, int X, int WEIGHTS>
void dot_int8_tiles() {
    _tile_dpbssd(SUMS, X, WEIGHTS);
}
#else
inline void load_tile_config(const void* config) {
    asm volatile("ldtilecfg (%0)" ::"r"(config) : "memory");
}
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }
template <int TILE>
void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int TILE>
void load_tile(const void* from, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(TILE) : "memory");
}
template <int TILE>
void store_tile(void* to, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(TILE) : "memory");
}
// sums += x times weights, pairs of bf16
template <int SUMS, int X, int WEIGHTS>
void dot_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(WEIGHTS));
}
// sums += x times weights, groups of four int8, in 32 bits
template <int SUMS, int X, int WEIGHTS>
void dot_int8_tiles() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(WEIGHTS));
}
#endif

// For up to 32 rows of x: the first 16 in tiles 0, 1 and 4, the others in 2, 3 and 5; complete
// weights in 6 and 7. k_bytes: of a row of x at once, as many rows of 4 of the weights. Clears all
// tiles.
inline void configure_tiles(int64_t rows, int64_t k_bytes = 64) {
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {};
    config.palette = 1;
    int64_t upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : upper;
    for (int tile = 0; tile < 8; tile++) {
        const bool of_x = tile == 4 || tile == 5;
        config.row_bytes[tile] = (uint16_t)(of_x ? k_bytes : 64);
        config.rows[tile] = (uint8_t)(tile >= 6                             ? k_bytes / 4
                                      : tile == 2 || tile == 3 || tile == 5 ? lower
                                                                            : upper);
    }
    load_tile_config(&config);
}

// Keeps tiles configured for as many rows as were asked for last, and releases them.
struct TileRows {
    int64_t configured = 0;

    void configure(int64_t rows, int64_t k_bytes = 64) {
        if (rows != configured) configure_tiles(rows, k_bytes);
        configured = rows;
    }
    ~TileRows() {
        if (configured) release_tiles();
    }
};
