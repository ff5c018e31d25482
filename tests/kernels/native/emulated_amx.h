// AMX tiles (TILE, BF16, INT8) in plain C++, for tests on processors without them. isa_amx.cpp
// includes this after emulated_avx512.h. Whatever makes the processor fault (a tile that is not
// configured, shapes that do not match) ends the process with a message.

struct TileConfig {  // in the layout of _tile_loadconfig
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

struct Tiles {
    TileConfig config;  // palette 0, the initial state: no tile may be used
    alignas(64) uint8_t data[8][16][64];
};
inline Tiles& tiles() {
    static thread_local Tiles mine{};  // registers belong to the thread
    return mine;
}

inline void refuse_unless(bool allowed, const char* what) {
    if (allowed) return;
    std::fprintf(stderr, "emulated AMX: %s\n", what);
    std::abort();
}
inline void check_tile(int tile) {
    refuse_unless(tiles().config.palette == 1, "no configuration is loaded");
    refuse_unless(tile >= 0 && tile < 8 && tiles().config.rows[tile],
                  "the tile has no rows by the configuration");
}
// C [m, n] += A [m, k] B [k, n], in elements of 4 bytes
inline void check_product(int c, int a, int b) {
    const TileConfig& config = tiles().config;
    for (int tile : {c, a, b}) check_tile(tile);
    refuse_unless(c != a && c != b && a != b, "the three tiles of a product must differ");
    refuse_unless(config.rows[c] == config.rows[a], "A and C differ in rows");
    refuse_unless(config.bytes_per_row[c] == config.bytes_per_row[b], "B and C differ in columns");
    refuse_unless(config.bytes_per_row[a] == 4 * config.rows[b],
                  "A has not as many columns as B has rows");
}

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud

inline void _tile_loadconfig(const void* p) {
    TileConfig config;
    std::memcpy(&config, p, sizeof config);
    refuse_unless(config.palette <= 1 && !config.start_row,
                  "the configuration's palette or start row");
    for (uint8_t byte : config.reserved)
        refuse_unless(!byte, "reserved bytes of the configuration are not zero");
    for (int i = 0; i < 16; i++) {
        refuse_unless(i < 8 || (!config.rows[i] && !config.bytes_per_row[i]),
                      "the configuration names a tile beyond the eighth");
        refuse_unless(config.rows[i] <= 16 && config.bytes_per_row[i] <= 64,
                      "a tile of more than 16 rows of 64 bytes");
        refuse_unless(!config.rows[i] == !config.bytes_per_row[i],
                      "a tile with rows and no columns, or the reverse");
    }
    tiles() = Tiles{};
    tiles().config = config;
}
inline void _tile_storeconfig(void* p) { std::memcpy(p, &tiles().config, sizeof(TileConfig)); }
inline void _tile_release() { tiles() = Tiles{}; }

inline void _tile_zero(int tile) {
    check_tile(tile);
    std::memset(tiles().data[tile], 0, sizeof tiles().data[tile]);
}
inline void _tile_loadd(int tile, const void* base, int64_t stride) {
    _tile_zero(tile);
    for (int row = 0; row < tiles().config.rows[tile]; row++)
        std::memcpy(tiles().data[tile][row], (const char*)base + row * stride,
                    tiles().config.bytes_per_row[tile]);
}
inline void _tile_stream_loadd(int tile, const void* base, int64_t stride) {
    _tile_loadd(tile, base, stride);
}
inline void _tile_stored(int tile, void* base, int64_t stride) {
    check_tile(tile);
    for (int row = 0; row < tiles().config.rows[tile]; row++)
        std::memcpy((char*)base + row * stride, tiles().data[tile][row],
                    tiles().config.bytes_per_row[tile]);
}

// The lower and the upper numbers of the pairs are summed separately, then both sums are added to
// C, as in Intel's manual.
inline void _tile_dpbf16ps(int c, int a, int b) {
    check_product(c, a, b);
    const TileConfig& config = tiles().config;
    int columns = config.bytes_per_row[c] / 4;
    for (int m = 0; m < config.rows[c]; m++) {
        float sums[32] = {};
        for (int k = 0; k < config.rows[b]; k++) {
            uint16_t left[2], right[32];
            std::memcpy(left, tiles().data[a][m] + 4 * k, 4);
            std::memcpy(right, tiles().data[b][k], 64);
            for (int i = 0; i < 2 * columns; i++)
                sums[i] = fma_flushed(from_bf16(left[i % 2]), from_bf16(right[i]), sums[i]);
        }
        float out[16];
        std::memcpy(out, tiles().data[c][m], 64);
        for (int n = 0; n < columns; n++)
            out[n] = flushed(flushed(out[n]) + flushed(sums[2 * n] + sums[2 * n + 1]));
        std::memcpy(tiles().data[c][m], out, 64);
    }
}

template <typename Left, typename Right>
void tile_dot_bytes(int c, int a, int b) {
    check_product(c, a, b);
    const TileConfig& config = tiles().config;
    for (int m = 0; m < config.rows[c]; m++) {
        uint32_t out[16];
        std::memcpy(out, tiles().data[c][m], 64);
        for (int k = 0; k < config.rows[b]; k++)
            for (int n = 0; n < config.bytes_per_row[c] / 4; n++)
                for (int i = 0; i < 4; i++)
                    out[n] += (uint32_t)((Left)tiles().data[a][m][4 * k + i] *
                                         (Right)tiles().data[b][k][4 * n + i]);
        std::memcpy(tiles().data[c][m], out, 64);
    }
}
inline void _tile_dpbssd(int c, int a, int b) { tile_dot_bytes<int8_t, int8_t>(c, a, b); }
inline void _tile_dpbsud(int c, int a, int b) { tile_dot_bytes<int8_t, uint8_t>(c, a, b); }
inline void _tile_dpbusd(int c, int a, int b) { tile_dot_bytes<uint8_t, int8_t>(c, a, b); }
inline void _tile_dpbuud(int c, int a, int b) { tile_dot_bytes<uint8_t, uint8_t>(c, a, b); }
