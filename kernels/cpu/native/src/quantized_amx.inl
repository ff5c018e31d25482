// A panel times up to 16 rows of x in AMX's int8 tiles, for many rows. The sums are integers, so
// the bits are those of VectorForm.

constexpr int64_t TILES_FROM_ROWS = 8;  // fewer do not fill a tile

template <typename Dot>
struct TileForm {
    static constexpr bool INT4 = std::is_same_v<Dot, Int4Dot>;
    static constexpr int MAX_ROWS = 16;
    static constexpr int64_t TILE_K = 64, TILE_BYTES = TILE_K * PANEL;  // of weights as int8

    const QuantizedLinear& call;
    const Worker& worker;
    // an int4 panel's weights as int8, those of the gate and of the up half
    int8_t* unpacked = nullptr;
    int64_t panels[2] = {-1, -1};
    TileRows tiles;

    TileForm(const QuantizedLinear& call, const Worker& worker) : call(call), worker(worker) {}

    static constexpr int panels_at_once(int64_t) { return 1; }
    static constexpr bool one_stream(int64_t) { return false; }

    void multiply(int64_t rows, const Panels& one, const Next&, int up, const QuantizedRows<Dot>& x,
                  Sums* sums) {
        const int64_t panel = one.first;
        tiles.configure(rows);
        const char* scales = (const char*)call.scales + panel * x.groups * Dot::SCALES;
        const int64_t depth = depth_of(call.in_features);
        const int8_t* weights = (const int8_t*)call.weight + panel * depth * PANEL;
        if (INT4) weights = unpack(panel, up, scales, x.groups);
        Vec total[MAX_ROWS];
        alignas(64) int32_t exact[2][MAX_ROWS][PANEL];
        for (int64_t group = 0; group < x.groups; group++, scales += Dot::SCALES) {
            auto& results = exact[group % 2];  // two, so that tiles need not wait for the vectors
            zero_tile<0>();
            for (int64_t k = group * Dot::GROUP; k < std::min((group + 1) * Dot::GROUP, depth);
                 k += TILE_K, weights += TILE_BYTES) {
                load_tile<4>(x.numbers + k, x.groups * Dot::GROUP);
                load_tile<6>(weights, 64);
                dot_int8_tiles<0, 4, 6>();
            }
            store_tile<0>(results, 64);
            Vec scale = Vec::load((const uint16_t*)(scales + Dot::SCALES_AT));
            for (int64_t row = 0; row < rows; row++)
                total[row] = Vec::fma(Ints::load(results[row]).to_floats(),
                                      scale * Vec(x.scales[row * x.groups + group]), total[row]);
        }
        for (int64_t row = 0; row < rows; row++) total[row].store(sums[row][0][up]);
    }

private:
    // Number times factor, in the blocks of int8
    const int8_t* unpack(int64_t panel, int up, const char* factors, int64_t groups) {
        if (!unpacked) unpacked = (int8_t*)worker.scratch(2 * groups * TILE_BYTES);
        int8_t* to = unpacked + up * groups * TILE_BYTES;
        if (panels[up] == panel) return to;
        panels[up] = panel;
        const uint8_t* block = (const uint8_t*)call.weight + panel * groups * Int4Dot::BLOCK;
        for (int64_t group = 0; group < groups;
             group++, block += Int4Dot::BLOCK, factors += SCALES_INT4)
            for (int half = 0; half < 2; half++, to += HALF_GROUP * PANEL)
                for (int64_t i = 0; i < HALF_GROUP * PANEL; i++)
                    to[i] = (int8_t)(((block[i] >> (4 * half) & 15) - 8) *
                                     (int8_t)factors[half * PANEL + i / 4 % PANEL]);
        return unpacked + up * groups * TILE_BYTES;
    }
};
