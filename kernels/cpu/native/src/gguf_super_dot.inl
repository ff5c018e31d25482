// Linear layers on GGUF's super-blocks of 256 (layout: gguf_dot.inl), with whole scales for
// parts of
// 32 or 16. All products of a super-block, times these scales, are one exact sum.
//
// Numbers are unsigned. Those that Ints::add_halves takes must fit 16 bits, so a run of 256 / BIAS
// numbers is summed as if each were less by BIAS: within 127 * 256 / 2. For types with minima, what
// that takes away is added back for the whole super-block.

struct SuperBlocks {
    static constexpr bool OWN_SCALES = true;
    static constexpr int64_t GROUP = GROUP_BLOCKS, DEPTH = GROUP_BLOCKS, SCALED = GROUP_BLOCKS;
    static constexpr int ONE_STREAM = 0;
    static constexpr int SUBS = GROUP_BLOCKS / BLOCK_SIZE, LINES = BLOCK_SIZE / 4;
};

// A super-block's exact sums. weights(sub, line, vector) are 4 numbers of sub-block `sub` of each
// output; factors[sub * F::FACTORS + i] are the scales of its parts.
template <typename F, int ROWS, int PANELS, typename Weights>
inline ALWAYS_INLINE void sum_super_block(const QuantizedRows<F>& x, int64_t group,
                                          const Blocks& soon,
                                          const Ints (&factors)[8 * F::FACTORS][PANELS * PARTS],
                                          Ints* exact, Weights weights) {
    constexpr int VECTORS = PANELS * PARTS, RUN = 256 / F::BIAS / 4, RUNS = F::LINES / RUN;
    const int64_t stride = x.groups * F::GROUP;
    written_out<ROWS * VECTORS>([&](int i) ALWAYS_INLINE { exact[i] = Ints(); });
#pragma GCC unroll 1
    for (int sub = 0; sub < F::SUBS; sub++) {
        constexpr int64_t SHOWN = F::BLOCK / F::SUBS;
        written_out<SHOWN / 64>(
            [&](int line) ALWAYS_INLINE { soon.ask_for<PANELS>(sub * SHOWN + 64 * line); });
        const int8_t* numbers = x.numbers + group * F::GROUP + sub * BLOCK_SIZE;
        written_out<RUNS>([&](int run) ALWAYS_INLINE {
            Ints sum[ROWS * VECTORS];
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                Ints start = Ints::repeat32(x.term(row, group, sub * RUNS + run));
                written_out<VECTORS>([&](int v) ALWAYS_INLINE { sum[row * VECTORS + v] = start; });
            });
            written_out<RUN>([&](int place) ALWAYS_INLINE {
                const int line = run * RUN + place;
                written_out<VECTORS>([&](int v) ALWAYS_INLINE {
                    const Ints w = weights(sub, line, v);
                    written_out<ROWS>([&](int row) ALWAYS_INLINE {
                        Ints& s = sum[row * VECTORS + v];
                        s = settled(Ints::add_nibbles(
                            s, w, Ints::repeat32(four_at(numbers + row * stride + 4 * line))));
                    });
                });
            });
            written_out<VECTORS>([&](int v) ALWAYS_INLINE {
                const Ints factor = factors[sub * F::FACTORS + run * F::FACTORS / RUNS][v];
                written_out<ROWS>([&](int row) ALWAYS_INLINE {
                    Ints& s = exact[row * VECTORS + v];
                    s = Ints::add_halves(s, sum[row * VECTORS + v], factor);
                });
            });
        });
    }
}

// Q4_K and Q5_K: eight scales and eight minima of 6 bits, packed into three words
template <bool FIVE_BITS>
struct Q45K : SuperBlocks {
    static constexpr int BIAS = FIVE_BITS ? 16 : 8, FACTORS = 1, RUNS = BIAS / 8;
    static constexpr int64_t NIBBLES = FIVE_BITS ? 8 * 4 * PANEL : 0,  // after the high bits
        LINE_OF_K = FIVE_BITS ? 10 : 8, BLOCK = GROUP * LINE_OF_K, WORDS = 4 * PANEL,
                             SCALES = 4 * WORDS, PAIRS = 8 * RUNS, TERMS = PAIRS + 4;

    // For each run its offset; then pairs of sums of 32, as the scales are paired
    static void terms(const int8_t* numbers, int32_t* to) {
        const SumsOf8 sums(numbers);
        for (int64_t i = 0; i < PAIRS; i++)
            to[i] = -BIAS * (FIVE_BITS ? sums.of_16(i) : sums.of_32(i)) & 0xffff;
        for (int64_t i = 0; i < 4; i++) {
            const int64_t first = i / 2 * 4 + i % 2;
            to[PAIRS + i] =
                (sums.of_32(first) & 0xffff) | (int32_t)((uint32_t)sums.of_32(first + 2) << 16);
        }
    }

    template <int ROWS, int PANELS>
    static ALWAYS_INLINE void add(const char* block, int64_t apart, const char* scales,
                                  int64_t scales_apart, const QuantizedRows<Q45K>& x, int64_t group,
                                  int64_t, const Blocks& soon, decltype(Vec::v)* total) {
        constexpr int VECTORS = PANELS * PARTS;
        Ints factors[8][VECTORS], pairs[4][VECTORS], leasts[4][VECTORS], exact[ROWS * VECTORS];
        written_out<VECTORS>([&](int v) ALWAYS_INLINE {
            const Ints first = scale_words(scales, scales_apart, v, WORDS),
                       second = scale_words(scales, scales_apart, v, 2 * WORDS),
                       rest = scale_words(scales, scales_apart, v, 3 * WORDS);
            const Ints low = first.low_six(), high = Ints::joined_six(rest.low_nibbles(), first);
            pairs[0][v] = low.even_bytes(), pairs[1][v] = low.odd_bytes();
            pairs[2][v] = high.even_bytes(), pairs[3][v] = high.odd_bytes();
            const Ints low_least = second.low_six(),
                       high_least = Ints::joined_six(rest.high_nibbles(), second);
            leasts[0][v] = low_least.even_bytes(), leasts[1][v] = low_least.odd_bytes();
            leasts[2][v] = high_least.even_bytes(), leasts[3][v] = high_least.odd_bytes();
            written_out<4>([&](int i) ALWAYS_INLINE {
                factors[i / 2 * 4 + i % 2][v] = pairs[i][v].low_factors();
                factors[i / 2 * 4 + i % 2 + 2][v] = pairs[i][v].high_factors();
            });
        });
        auto weights = [&](int sub, int line, int v) ALWAYS_INLINE {
            const char* words = vector_at(block, apart, v, Ints::BYTES) + line * WORDS;
            const Ints nibbles =
                Ints::load(words + NIBBLES + sub / 2 * 8 * WORDS).nibbles(sub % 2 * 4);
            if constexpr (!FIVE_BITS) return nibbles;
            else return Ints::with_bits_above(nibbles, Ints::load(words), sub, 1);
        };
        sum_super_block<Q45K, ROWS, PANELS>(x, group, soon, factors, exact, weights);
        written_out<VECTORS>([&](int v) ALWAYS_INLINE {
            const Vec scale = half_scales(scales, scales_apart, v, 0),
                      least = Vec() - half_scales(scales, scales_apart, v, 2 * PANEL);
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                Ints below, taken;
                written_out<4>([&](int i) ALWAYS_INLINE {
                    const Ints sums = Ints::repeat32(x.term(row, group, PAIRS + i));
                    below = Ints::add_products(below, leasts[i][v], sums);
                    taken = Ints::add_products(taken, pairs[i][v], sums);
                });
                const Ints all = Ints::add(exact[row * VECTORS + v], taken.times(BIAS));
                auto& sum = total[row * VECTORS + v];
                sum = Vec::fma(Vec::fma(below.to_floats(), least, all.to_floats() * scale),
                               Vec(x.scales[row * x.groups + group]), Vec(sum))
                          .v;
            });
        });
    }

    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        numbers += k / GROUP * BLOCK + 4 * lane, scales += k / GROUP * SCALES, k %= GROUP;
        const int64_t sub = k / 32, i = k % 32, at = i / 4 * WORDS + i % 4;
        int number = (uint8_t)numbers[NIBBLES + sub / 2 * 8 * WORDS + at] >> (sub % 2 * 4) & 15;
        if (FIVE_BITS) number |= ((uint8_t)numbers[at] >> sub & 1) << 4;
        const auto byte = [=](int64_t word) {
            return (uint8_t)scales[word * WORDS + 4 * lane + sub % 4];
        };
        const int scale = sub < 4 ? byte(1) & 63 : (byte(3) & 15) | (byte(1) >> 2 & 48),
                  least = sub < 4 ? byte(2) & 63 : byte(3) >> 4 | (byte(2) >> 2 & 48);
        return half_at(scales + 2 * lane) * (float)scale * (float)number -
               half_at(scales + 2 * (PANEL + lane)) * (float)least;
    }
};
using Q4_K = Q45K<false>;
using Q5_K = Q45K<true>;

// Two scales of 8 bits per 32 numbers. A byte of low bits has numbers i and i + 64 of 128, a
// byte of
// high ones i, i + 32, i + 64 and i + 96.
struct Q6_K : SuperBlocks {
    static constexpr int BIAS = 32, FACTORS = 2;
    static constexpr int64_t WORDS = 4 * PANEL, LINE_OF_K = 12, BLOCK = GROUP * LINE_OF_K,
                             HIGH = 32 * WORDS, SCALES = 4 * WORDS + 2 * PANEL, TERMS = GROUP / 8;

    static void terms(const int8_t* numbers, int32_t* to) {
        const SumsOf8 sums(numbers);
        for (int64_t i = 0; i < TERMS; i++) to[i] = -BIAS * sums.at[i] & 0xffff;
    }

    template <int ROWS, int PANELS>
    static ALWAYS_INLINE void add(const char* block, int64_t apart, const char* scales,
                                  int64_t scales_apart, const QuantizedRows<Q6_K>& x, int64_t group,
                                  int64_t, const Blocks& soon, decltype(Vec::v)* total) {
        constexpr int VECTORS = PANELS * PARTS;
        Ints factors[16][VECTORS], exact[ROWS * VECTORS];
        written_out<VECTORS>([&](int v) ALWAYS_INLINE {
            written_out<4>([&](int word) ALWAYS_INLINE {
                const Ints four = scale_words(scales, scales_apart, v, word * WORDS),
                           even = four.even_signed_bytes(), odd = four.odd_signed_bytes();
                factors[4 * word][v] = even.low_factors();
                factors[4 * word + 1][v] = odd.low_factors();
                factors[4 * word + 2][v] = even.high_factors();
                factors[4 * word + 3][v] = odd.high_factors();
            });
        });
        auto weights = [&](int sub, int line, int v) ALWAYS_INLINE {
            const char* words = vector_at(block, apart, v, Ints::BYTES) + line * WORDS;
            const int half = sub / 4, part = sub % 4;
            return Ints::with_bits_above(
                Ints::load(words + (half * 16 + part % 2 * 8) * WORDS).nibbles(part / 2 * 4),
                Ints::load(words + HIGH + half * 8 * WORDS), part * 2, 3);
        };
        sum_super_block<Q6_K, ROWS, PANELS>(x, group, soon, factors, exact, weights);
        written_out<VECTORS>([&](int v) ALWAYS_INLINE {
            const Vec scale = half_scales(scales, scales_apart, v, 4 * WORDS);
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                auto& sum = total[row * VECTORS + v];
                sum = Vec::fma(exact[row * VECTORS + v].to_floats() * scale,
                               Vec(x.scales[row * x.groups + group]), Vec(sum))
                          .v;
            });
        });
    }

    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        numbers += k / GROUP * BLOCK + 4 * lane, scales += k / GROUP * SCALES, k %= GROUP;
        const int64_t part = k % 128, i = part % 64;
        const int low =
                      (uint8_t)numbers[(k / 128 * 16 + i / 4) * WORDS + i % 4] >> (part / 64 * 4) &
                      15,
                  high = (uint8_t)numbers[HIGH + (k / 128 * 8 + k % 32 / 4) * WORDS + k % 4] >>
                             (part / 32 * 2) &
                         3;
        const float scale = (float)(int8_t)scales[k / 64 * WORDS + 4 * lane + k / 16 % 4];
        return half_at(scales + 4 * WORDS + 2 * lane) * scale * (float)((low | high << 4) - 32);
    }
};

// out [rows, size] = rows of a table of blocks for the step's token ids, dequantized
template <typename T, typename F>
void embedding_of_blocks(const EmbeddingInt8& a, int64_t rows, const Step& step,
                         const Worker& worker) {
    const int64_t piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            const int64_t id = step.token_ids[row], panel = id / PANEL;
            T* out = (T*)a.out + row * a.out_row;
            if (id < 0 || id >= a.num_ids) {
                set_nan((char*)out, a.size * sizeof(T));
                continue;
            }
            const char *numbers = (const char*)a.table + panel * a.size * F::LINE_OF_K,
                       *scales = (const char*)a.scales + panel * scales_of_panel<F>(a.size);
            for (int64_t k = 0; k < a.size; k++)
                put(out + k, F::weight(numbers, scales, id % PANEL, k));
        }
}

template <typename F>
void gguf_embedding(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, (embedding_of_blocks<T, F>((const EmbeddingInt8&)call,
                                                     rows_of(call, step), step, worker)));
}
