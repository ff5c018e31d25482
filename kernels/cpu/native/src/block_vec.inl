// The innermost block of a linear layer in vector registers: a few rows of x times a few panels of weights.

// Weights are asked for this far ahead of their use: a memory's latency at a core's share of its bandwidth.
constexpr int64_t PREFETCH_BYTES = 4096;

// sums [ROWS, PANELS * 16] += x [ROWS, k] times PANELS panels; x's rows are STRIDE apart. The sum over a piece takes one k after the other,
// whatever ROWS and PANELS are, so that a row's result is the same beside any others; pieces summed apart keep the error of long sums small.
template <typename Dot, int64_t STRIDE, int ROWS, int PANELS>
void multiply_rows(const typename Dot::X* x, const typename Dot::Weight* weights, int64_t panel_size, int64_t lines, float* sums,
                   int64_t sums_row, bool first) {
    constexpr int VECS = PANEL / Vec::LANES, LINE = 64 / sizeof(*weights), PART = LINE / VECS;
    constexpr int BESIDE = ROWS * PANELS * VECS + PANELS * VECS < REGISTERS ? PANELS : 1;  // panels that a number of x, once loaded, meets
    Vec sum[ROWS][PANELS][VECS];
    const typename Dot::X* next_rows = x + ROWS * STRIDE;  // those of the next call, where there are many
    for (int64_t line = 0; line < lines; line++) {
        for (int panel = 0; panel < PANELS; panel++)
            __builtin_prefetch((const char*)(weights + panel * panel_size) + PREFETCH_BYTES / PANELS);
        if (ROWS >= 12) __builtin_prefetch((const char*)next_rows + 64 * line);
#pragma GCC unroll 2
        for (int step = 0; step < Dot::STEPS; step++)
#pragma GCC unroll 4
            for (int panel = 0; panel < PANELS; panel += BESIDE) {
                asm volatile("" : "+r"(x), "+r"(weights));  // what was loaded is loaded again: the registers are for sums
                decltype(Dot::weights(weights, step)) w[BESIDE][VECS];
                for (int p = 0; p < BESIDE; p++)
                    for (int i = 0; i < VECS; i++) w[p][i] = Dot::weights(weights + (panel + p) * panel_size + i * PART, step);
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; row++)
                    for (int p = 0; p < BESIDE; p++)
                        for (int i = 0; i < VECS; i++)
                            sum[row][panel + p][i] = Dot::add(sum[row][panel + p][i], w[p][i], x + row * STRIDE + step * Dot::X_PER_STEP);
            }
        x += Dot::STEPS * Dot::X_PER_STEP;
        weights += LINE;
    }
    for (int row = 0; row < ROWS; row++)
        for (int panel = 0; panel < PANELS; panel++)
            for (int i = 0; i < VECS; i++) {
                float* place = sums + row * sums_row + panel * PANEL + i * Vec::LANES;
                (first ? sum[row][panel][i] : Vec::load(place) + sum[row][panel][i]).store(place);
            }
}

constexpr int panels_beside(int rows, int max_sums = MAX_SUMS) {
    int most = max_sums / (rows * (PANEL / Vec::LANES));
    return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

template <typename Dot>
struct VecBlock {
    using Weight = typename Dot::Weight;
    using X = typename Dot::X;
    static constexpr int MAX_ROWS = MAX_SUMS / 2;                       // beside one panel of AVX2, two of AVX-512
    static constexpr int64_t DEPTH = 16384 / PANEL / sizeof(Weight) / panels_beside(MAX_ROWS);  // 16 KiB of weights stay in the first cache
    static constexpr int64_t STRIDE = DEPTH + 64 / sizeof(X);           // of x's rows: not a power of two, whose lines share a cache set
    static constexpr int64_t CHUNK_ROWS = 96;                           // whose DEPTH stays in the second cache

    const Weight* weights;
    int64_t panel_size;

    explicit VecBlock(const Linear& call)
        : weights((const Weight*)call.weight), panel_size(round_up(call.in_features, 4 / (int64_t)sizeof(Weight)) * PANEL) {}

    static int64_t group(int64_t) { return 4; }  // panels of an item
    static constexpr int panels_at_once(int64_t rows) { return panels_beside((int)rows); }

    // k counts from `begin`, where x stands.
    void multiply(int64_t rows, int64_t panels, const X* x, int64_t panel, int64_t begin, int64_t size, float* sums, int64_t sums_row) {
        const Weight* from = weights + panel * panel_size + begin * PANEL;
        int64_t lines = round_up(size, 4 / (int64_t)sizeof(Weight)) * sizeof(Weight) / 4;
        multiply_exactly<MAX_ROWS>(rows, panels, x, from, lines, sums, sums_row, begin == 0);
    }

private:
    template <int ROWS>
    void multiply_exactly(int64_t rows, int64_t panels, const X* x, const Weight* from, int64_t lines, float* sums, int64_t sums_row, bool first) {
        if constexpr (ROWS > 1)
            if (rows != ROWS) return multiply_exactly<ROWS - 1>(rows, panels, x, from, lines, sums, sums_row, first);
        constexpr int PANELS = panels_beside(ROWS);
        int64_t panel = 0;
        for (; panel + PANELS <= panels; panel += PANELS)
            multiply_rows<Dot, STRIDE, ROWS, PANELS>(x, from + panel * panel_size, panel_size, lines, sums + panel * PANEL, sums_row, first);
        for (; panel < panels; panel++)
            multiply_rows<Dot, STRIDE, ROWS, 1>(x, from + panel * panel_size, panel_size, lines, sums + panel * PANEL, sums_row, first);
    }
};
