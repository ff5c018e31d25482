// Many rows of x times blocks in AMX's int8 tiles. Included by quantized.inl. Panels are unpacked
// to signed bytes, whose lines [16 outputs][4] are those of a tile. The product of two tiles is the
// exact sum under one scale, and sums are added as by UnpackedForm, so the bits are the same.

// A step of k: so many exact sums of an output. While tiles multiply for the next step, vectors add
// those of this one, a few rows after each product.
constexpr int TILE_SUMS = 4, ROWS_BESIDE = 4;

// Up to 16 rows times PANELS unpacked panels, which begin at `data`
template <typename Kind, int PANELS>
struct BlockTiles {
    using Panel = Unpacked<Kind>;
    static constexpr int OF_BLOCK = Kind::PARTS_OF_32, STEP = TILE_SUMS / OF_BLOCK;  // blocks
    static constexpr int64_t K = BLOCK_SIZE / OF_BLOCK;  // under one scale

    const char* data;
    const int64_t blocks, rows;
    const QuantizedRows<Kind> x;
    const Share& soon;
    const int64_t place;
    const int up;
    Sums* sums;
    alignas(64) int32_t exact[2][PANELS][TILE_SUMS][TILE_SUMS * ROWS_BESIDE][PANEL];

    __attribute__((noinline)) void multiply() {
        for (int64_t row = 0; row < rows; row++)
            for (int p = 0; p < PANELS; p++) Vec().store(sums[row][place + p][up]);
        const int64_t steps = ceil_div(blocks, STEP);
        int64_t asked = 0;
        for (int64_t step = 0; step <= steps; step++) {
            soon.ask_for<PANELS>(asked, std::min(step + 1, steps), steps);
            do_part<0>(step);
        }
    }

private:
    template <int PART>
    ALWAYS_INLINE void do_part(int64_t step) {
        if constexpr (PART < TILE_SUMS) {
            if (step * STEP + PART / OF_BLOCK < blocks) multiply_tiles<PART>(step);
            if (step > 0) add_rows<ROWS_BESIDE>(step - 1, PART * ROWS_BESIDE);
            do_part<PART + 1>(step);
        }
    }

    template <int PART, int P = 0>
    ALWAYS_INLINE void multiply_tiles(int64_t step) {
        constexpr int TO = PART % 2 * 2 + P, X = 4 + PART % 2, WEIGHTS = 6 + P;
        const int64_t block = step * STEP + PART / OF_BLOCK;
        if (P == 0)
            load_tile<X>(x.numbers + block * BLOCK_SIZE + PART % OF_BLOCK * K,
                         x.groups * Kind::GROUP);
        load_tile<WEIGHTS>(data + (P * blocks + block) * Panel::BYTES + PART % OF_BLOCK * K * PANEL,
                           WORDS);
        zero_tile<TO>();
        dot_int8_tiles<TO, X, WEIGHTS>();
        store_tile<TO>(exact[step % 2][P][PART], WORDS);
        if constexpr (P + 1 < PANELS) multiply_tiles<PART, P + 1>(step);
    }

    template <int ROWS>
    ALWAYS_INLINE void add_rows(int64_t step, int64_t first) {
        if constexpr (ROWS > 0) {
            if (first + ROWS > rows) return add_rows<ROWS - 1>(step, first);
            const auto& from = exact[step % 2];
            const int64_t begin = step * STEP, end = std::min(begin + STEP, blocks);
            Vec total[PANELS][ROWS];
            const auto each = [&](auto f) ALWAYS_INLINE {
                written_out<PANELS>([&](int p) ALWAYS_INLINE {
                    written_out<ROWS>([&](int row) ALWAYS_INLINE {
                        f(p, row, total[p][row], sums[first + row][place + p][up]);
                    });
                });
            };
            each([&](int, int, Vec& t, float* sum) ALWAYS_INLINE { t = Vec::load(sum); });
            for (int64_t block = begin; block < end; block++) {
                const char* panel = data + block * Panel::BYTES + Panel::NUMBERS;
                const auto scale_of = [&](int p, int i) ALWAYS_INLINE {
                    return Vec::load(
                        (const float*)(panel + p * blocks * Panel::BYTES + i * Panel::SCALES));
                };
                const auto group_of = [&](int row) ALWAYS_INLINE {
                    return (first + row) * x.groups * BLOCKS + block;
                };
                written_out<OF_BLOCK>([&](int part) ALWAYS_INLINE {
                    each([&](int p, int row, Vec& t, float*) ALWAYS_INLINE {
                        const Ints sum =
                            Ints::load(from[p][(block - begin) * OF_BLOCK + part][first + row]);
                        t = Vec::fma(sum.to_floats() * Vec(x.scales[group_of(row)]),
                                     scale_of(p, part), t);
                    });
                });
                if constexpr (Kind::LEAST)
                    each([&](int p, int row, Vec& t, float*) ALWAYS_INLINE {
                        t = Vec::fma(Vec(float_of(x.all_terms[group_of(row)])),
                                     scale_of(p, OF_BLOCK), t);
                    });
            }
            each([&](int, int, Vec& t, float* sum) ALWAYS_INLINE { t.store(sum); });
        }
    }
};

template <typename F>
struct BlockTileForm {
    using Kind = typename F::Kind;
    static constexpr int MAX_ROWS = TILE_SUMS * ROWS_BESIDE, BESIDE = 2;

    UnpackedPanels<F, BESIDE, true> unpacked;
    TileRows tiles;

    BlockTileForm(const QuantizedLinear& call, const Worker& worker) : unpacked(call, worker) {}

    static constexpr int panels_at_once(int64_t) { return BESIDE; }
    static constexpr bool one_stream(int64_t) { return false; }

    void multiply(int64_t rows, const Panels& panels, const Next& next, int up,
                  const QuantizedRows<F>& x, Sums* sums) {
        tiles.configure(rows, BLOCK_SIZE / F::PARTS_OF_32);
        const char* data = unpacked.of(panels, up);
        if (panels.count == BESIDE)
            return multiply_panels<BESIDE>(rows, data, next, 0, up, x, sums);
        for (int64_t i = 0; i < panels.count; i++)
            multiply_panels<1>(rows, data + i * unpacked.bytes, next, i, up, x, sums);
    }

private:
    template <int PANELS>
    void multiply_panels(int64_t rows, const char* data, const Next& next, int64_t place, int up,
                         const QuantizedRows<F>& x, Sums* sums) const {
        BlockTiles<Kind, PANELS>{data,
                                 unpacked.blocks,
                                 rows,
                                 x.template as<Kind>(),
                                 unpacked.share_of(next, place),
                                 place,
                                 up,
                                 sums}
            .multiply();
    }
};
