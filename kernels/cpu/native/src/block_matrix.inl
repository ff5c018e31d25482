// The innermost block of a linear layer in bf16 where an instruction multiplies 2 x 4 numbers by
// 4 x 2 (bfmmla): pairs of rows times pairs of columns. It adds its two pairs of k one after the
// other, with the roundings of the instruction of DotBf16, so the bits of a row are those that
// VecBlock gives, which multiplies single rows.

struct MatrixBlock : VecBlock<DotBf16> {
    using Base = VecBlock<DotBf16>;
    static constexpr int MAX_ROWS = 6;  // 24 registers of sums

    using Base::Base;
    static constexpr int panels_at_once(int64_t rows) {
        return rows == 1 ? Base::panels_at_once(1) : 1;
    }

    void multiply(int64_t rows, int64_t panels, const X* x, int64_t panel, int64_t begin,
                  int64_t size, float* sums, int64_t sums_row, const Weight* next, int64_t j,
                  int64_t blocks) {
        const int64_t lines = ceil_div(size, 2);
        if (rows == 1 || lines % 2) {
            for (int64_t row = 0; row < rows; row++)
                Base::multiply(1, panels, x + row * STRIDE, panel, begin, size,
                               sums + row * sums_row, sums_row, next, j, blocks);
            return;
        }
        for (int64_t i = 0; i < panels; i++) {
            const Weight* from = at(panel + i, begin);
            const auto ahead = Ahead<Weight>::of(from, i + 1 < panels ? from + panel_size : next,
                                                 LINE, lines, PREFETCH_BYTES / 64, j, blocks);
            float* to = sums + i * PANEL;
            if (rows > 4) multiply_pairs<3>(rows, x, from, lines, to, sums_row, begin == 0, ahead);
            else if (rows > 2)
                multiply_pairs<2>(rows, x, from, lines, to, sums_row, begin == 0, ahead);
            else multiply_pairs<1>(rows, x, from, lines, to, sums_row, begin == 0, ahead);
        }
    }

private:
    // The last row alone is multiplied twice.
    template <int PAIRS>
    static __attribute__((noinline)) void multiply_pairs(int64_t rows, const X* x,
                                                         const Weight* weights, int64_t lines,
                                                         float* sums, int64_t sums_row, bool first,
                                                         Ahead<Weight> ahead) {
        const int64_t last = rows % 2 ? 0 : STRIDE;  // from the last pair's first row to its second
        PairsOfRows sum[PAIRS][PANEL / 4];
        for (int64_t line = 0; line < lines; line += 2) {
            for (int64_t i = line; i < line + 2; i++) {
                if (i == ahead.turn) ahead.from = ahead.then;
                if ((i & (ahead.every - 1)) == 0) {
                    __builtin_prefetch(ahead.from, 0, 2);
                    ahead.from += LINE;
                }
            }
            PairsOfRows::Numbers held[PAIRS];
#pragma GCC unroll 4
            for (int pair = 0; pair < PAIRS; pair++)
                held[pair] = PairsOfRows::numbers(
                    x + 2 * pair * STRIDE,
                    x + 2 * pair * STRIDE + (pair == PAIRS - 1 ? last : STRIDE));
#pragma GCC unroll 4
            for (int i = 0; i < PANEL / 4; i++) {
                const PairsOfRows::Columns columns(weights + 8 * i, weights + LINE + 8 * i);
#pragma GCC unroll 4
                for (int pair = 0; pair < PAIRS; pair++) sum[pair][i].add(held[pair], columns);
            }
            x += 4, weights += 2 * LINE;
        }
#pragma GCC unroll 4
        for (int pair = 0; pair < PAIRS; pair++)
#pragma GCC unroll 4
            for (int i = 0; i < PANEL / 4; i++) {
                float* to = sums + 2 * pair * sums_row + 4 * i;
                sum[pair][i].store(to, 2 * pair + 1 < rows ? to + sums_row : nullptr, first);
            }
    }
};
