// The innermost block of a linear layer in vector registers: a few rows of x times a few panels of
// weights.

// How far ahead a product prefetches weights from memory, into the L2 cache: L1 allows few
// outstanding lines.
constexpr int64_t PREFETCH_BYTES = 8192;

// Weights that a product prefetches: a line of each panel, from `from` on, in every `every`-th of
// its lines; from line `turn` on those from `then` on.
template <typename Weight>
struct Ahead {
    const Weight* from;
    int64_t every = 1;  // a power of two
    int64_t turn = -1;
    const Weight* then = nullptr;

    // For a product of `lines` lines from `weights` on in each panel, in block j of `blocks` blocks
    // of rows; the weights after it are at `next`. Only the first block reads weights from memory.
    // If there are several, each prefetches a share of the next product's weights into the L1
    // cache.
    static Ahead of(const Weight* weights, const Weight* next, int64_t line, int64_t lines,
                    int64_t distance, int64_t j, int64_t blocks) {
        if (blocks > 1) {
            int64_t every = blocks >= 4 ? 4 : 2;
            return j < every ? Ahead{next + lines * j / every * line, every}
                             : Ahead{next, int64_t{1} << 62};
        }
        return distance < lines ? Ahead{weights + distance * line, 1, lines - distance, next}
                                : Ahead{next};
    }
};

// Up to this many rows read their weights as one stream, which the processor prefetches in time.
// With AVX2 (a Zen 3) four streams are faster.
constexpr int ROWS_OF_ONE_STREAM = Vec::LANES == 16 ? 2 : 0;

// sums [ROWS, PANELS * 16] += x [ROWS, k] times PANELS panels; x's rows are STRIDE apart. The sum
// over a piece takes k in ascending order for all ROWS and PANELS, so a row's result does not
// depend on other rows. Summing pieces separately keeps the error of long sums small.
template <typename Dot, int64_t STRIDE, int ROWS, int PANELS>
void multiply_rows(const typename Dot::X* x, const typename Dot::Weight* weights,
                   int64_t panel_size, int64_t lines, float* sums, int64_t sums_row, bool first,
                   Ahead<typename Dot::Weight> ahead) {
    constexpr int VECS = PANEL / Vec::LANES, LINE = 64 / sizeof(*weights), PART = LINE / VECS;
    // panels that a loaded number of x is multiplied with
    constexpr int BESIDE = ROWS * PANELS * VECS + PANELS * VECS < REGISTERS ? PANELS : 1;
    Vec sum[ROWS][PANELS][VECS];
    // those of the next call, if there are many
    const typename Dot::X* next_rows = x + ROWS * STRIDE;
    for (int64_t line = 0; line < lines; line++) {
        if (line == ahead.turn) ahead.from = ahead.then;
        if (ROWS > ROWS_OF_ONE_STREAM && (line & (ahead.every - 1)) == 0) {
            // not in a function: GCC 12 then spills all sums
            for (int panel = 0; panel < PANELS; panel++)
                if (ahead.every > 1) __builtin_prefetch(ahead.from + panel * panel_size);
                else __builtin_prefetch(ahead.from + panel * panel_size, 0, 2);
            ahead.from += LINE;
        }
        if (ROWS >= 12) __builtin_prefetch((const char*)next_rows + 64 * line);
#pragma GCC unroll 2
        for (int step = 0; step < Dot::STEPS; step++)
#pragma GCC unroll 4
            for (int panel = 0; panel < PANELS; panel += BESIDE) {
                // forces operands to be loaded again: the registers are for sums
                asm volatile("" : "+r"(x), "+r"(weights));
                decltype(Dot::weights(weights, step)) w[BESIDE][VECS];
                for (int p = 0; p < BESIDE; p++)
                    for (int i = 0; i < VECS; i++)
                        w[p][i] = Dot::weights(weights + (panel + p) * panel_size + i * PART, step);
#pragma GCC unroll 16
                for (int row = 0; row < ROWS; row++)
                    for (int p = 0; p < BESIDE; p++)
                        for (int i = 0; i < VECS; i++)
                            sum[row][panel + p][i] =
                                Dot::add(sum[row][panel + p][i], w[p][i],
                                         x + row * STRIDE + step * Dot::X_PER_STEP);
            }
        x += Dot::STEPS * Dot::X_PER_STEP;
        weights += LINE;
    }
#pragma GCC unroll 16  // without it GCC spills all sums
    for (int row = 0; row < ROWS; row++, sums += sums_row)
#pragma GCC unroll 4
        for (int panel = 0; panel < PANELS; panel++)
#pragma GCC unroll 2
            for (int i = 0; i < VECS; i++) {
                float* place = sums + panel * PANEL + i * Vec::LANES;
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
    static constexpr int MAX_ROWS = MAX_SUMS / 2;  // next to one panel with AVX2, two with AVX-512
    // 16 KiB of weights stay in the L1 cache
    static constexpr int64_t DEPTH = 16384 / PANEL / sizeof(Weight) / panels_beside(MAX_ROWS);
    // of x's rows: not a power of two, whose lines would share a cache set
    static constexpr int64_t STRIDE = DEPTH + 64 / sizeof(X);
    static constexpr int64_t CHUNK_ROWS = 96;  // rows whose DEPTH stays in the L2 cache

    const Weight* weights;
    int64_t panel_size;

    explicit VecBlock(const Linear& call)
        : weights((const Weight*)call.weight),
          panel_size(round_up(call.in_features, 4 / (int64_t)sizeof(Weight)) * PANEL) {}

    static constexpr int64_t LINE = 64 / sizeof(Weight);
    // Panels per item, of the given number for all threads. A long item is one stream of weights;
    // many items balance the load.
    static int64_t group(int64_t, int64_t panels, int64_t threads) {
        return std::max<int64_t>(4, std::min<int64_t>(16, panels / (16 * threads) / 4 * 4));
    }
    static constexpr int panels_at_once(int64_t rows) {
        return rows <= ROWS_OF_ONE_STREAM ? 1 : panels_beside((int)rows);
    }

    const Weight* at(int64_t panel, int64_t begin) const {
        return weights + panel * panel_size + begin * PANEL;
    }

    // k counts from `begin`, the position of x. Block j of `blocks` blocks of rows; `next`: the
    // weights after these.
    void multiply(int64_t rows, int64_t panels, const X* x, int64_t panel, int64_t begin,
                  int64_t size, float* sums, int64_t sums_row, const Weight* next, int64_t j,
                  int64_t blocks) {
        const Weight* from = at(panel, begin);
        int64_t lines = round_up(size, 4 / (int64_t)sizeof(Weight)) * sizeof(Weight) / 4;
        const auto ahead = Ahead<Weight>::of(from, next, LINE, lines,
                                             PREFETCH_BYTES / 64 / panels_at_once(rows), j, blocks);
        multiply_exactly<MAX_ROWS>(rows, panels, x, from, lines, sums, sums_row, begin == 0, ahead);
    }

private:
    template <int ROWS>
    void multiply_exactly(int64_t rows, int64_t panels, const X* x, const Weight* from,
                          int64_t lines, float* sums, int64_t sums_row, bool first,
                          Ahead<Weight> ahead) {
        if constexpr (ROWS > 1)
            if (rows != ROWS)
                return multiply_exactly<ROWS - 1>(rows, panels, x, from, lines, sums, sums_row,
                                                  first, ahead);
        constexpr int PANELS = panels_at_once(ROWS);
        int64_t panel = 0;
        for (; panel + PANELS <= panels; panel += PANELS)
            multiply_rows<Dot, STRIDE, ROWS, PANELS>(x, from + panel * panel_size, panel_size,
                                                     lines, sums + panel * PANEL, sums_row, first,
                                                     ahead);
        for (; panel < panels; panel++)
            multiply_rows<Dot, STRIDE, ROWS, 1>(x, from + panel * panel_size, panel_size, lines,
                                                sums + panel * PANEL, sums_row, first, ahead);
    }
};
