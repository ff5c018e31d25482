// Exact sums of products of integers for one group of k: a few rows of x times a few panels of int8
// or int4 weights. Included by quantized.inl.

inline int32_t four_at(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return four;
}

// A block of each panel, `apart` bytes apart
struct Blocks {
    const char* first;
    int64_t apart;

    template <int PANELS>
    ALWAYS_INLINE void ask_for(int64_t at) const {
        written_out<PANELS>(
            [&](int panel) ALWAYS_INLINE { __builtin_prefetch(first + panel * apart + at, 0, 2); });
    }
};

// Vector i of the outputs of panels whose data are `apart` bytes apart
inline const char* vector_at(const char* data, int64_t apart, int i, int64_t bytes) {
    return data + i / PARTS * apart + i % PARTS * bytes;
}

#ifdef QUIRE_I8MM
// Exact sums of ROWS rows and VECTORS vectors of outputs by products of matrices: pairs of rows
// times pairs of outputs. The last of an odd number of rows is multiplied twice.
template <int ROWS, int VECTORS>
struct PairsOfSums {
    static constexpr int PAIRS = (ROWS + 1) / 2;
    TwoRowsOfInts sums[PAIRS * VECTORS];

    // start(row): the initial value of a row's sums
    template <typename Start>
    ALWAYS_INLINE explicit PairsOfSums(Start start) {
        written_out<PAIRS * VECTORS>([&](int i) ALWAYS_INLINE {
            sums[i] = TwoRowsOfInts(start(i / VECTORS * 2), start(second_of(i / VECTORS)));
        });
    }
    // Adds eight numbers of each row. weights(i, v): the first or the second four of each output of
    // vector v
    template <typename Weights>
    ALWAYS_INLINE void add(const int8_t* numbers, int64_t stride, Weights weights) {
        TwoRowsOfInts::Numbers held[PAIRS];
        written_out<PAIRS>([&](int pair) ALWAYS_INLINE {
            held[pair] = TwoRowsOfInts::numbers(numbers + 2 * pair * stride,
                                                numbers + second_of(pair) * stride);
        });
        written_out<VECTORS>([&](int v) ALWAYS_INLINE {
            const TwoRowsOfInts::Columns columns(weights(0, v), weights(1, v));
            written_out<PAIRS>(
                [&](int pair) ALWAYS_INLINE { sums[pair * VECTORS + v].add(held[pair], columns); });
        });
    }
    ALWAYS_INLINE void copy_to(Ints* to) const {
        written_out<ROWS * VECTORS>([&](int i) ALWAYS_INLINE {
            to[i] = sums[i / VECTORS / 2 * VECTORS + i % VECTORS].row(i / VECTORS % 2);
        });
    }

private:
    static constexpr int second_of(int pair) { return std::min(2 * pair + 1, ROWS - 1); }
};
#endif

// A group's exact sums for ROWS rows and PANELS panels, whose blocks are `apart` bytes apart; the
// group has `size` numbers.
struct Int8Dot {
    static constexpr bool OWN_SCALES = false;
    static constexpr int MAX_DIRECT_ROWS = MAX_EXACT_SUMS / 2;
    static constexpr int64_t GROUP = GROUP_INT8, UNDER_SCALE = GROUP, DEPTH = 64, SCALED = GROUP,
                             LINE_OF_K = PANEL, BLOCK = GROUP * LINE_OF_K, SCALES = SCALES_INT8,
                             SCALES_AT = 0, TERMS = 1;
    static constexpr int ONE_STREAM = ROWS_OF_ONE_STREAM;  // rows
    static void terms(const int8_t* numbers, const float*, int32_t* to) {
        *to = -128 * sum_of(numbers, GROUP);
    }

    // In 16 bits a pair's products are within 2 * 127 * 127.
    template <int ROWS, int PANELS>
    static ALWAYS_INLINE void dot(const char* block, int64_t apart, const char*, int64_t,
                                  const QuantizedRows<Int8Dot>& x, int64_t group, int64_t size,
                                  const Blocks& soon, Ints* sums) {
        // SHARES: of k, with sums that are added to in turns
        constexpr int VECTORS = PANELS * PARTS, SUMS = ROWS * VECTORS,
                      SHARES = SUMS < 4 ? 4 / SUMS : 1;
        const int64_t stride = x.groups * GROUP;
        const int8_t* numbers = x.numbers + group * GROUP;
#ifdef QUIRE_I8MM
        if constexpr (ROWS > 1) {
            PairsOfSums<ROWS, VECTORS> pairs([](int) ALWAYS_INLINE { return 0; });
#pragma GCC unroll 1
            for (int64_t k = 0; k < size; k += 8, block += 8 * PANEL, numbers += 8) {
                soon.ask_for<PANELS>(k * LINE_OF_K), soon.ask_for<PANELS>((k + 4) * LINE_OF_K);
                pairs.add(numbers, stride, [&](int i, int v) ALWAYS_INLINE {
                    return Ints::load(vector_at(block + i * 4 * PANEL, apart, v, Ints::BYTES));
                });
            }
            return pairs.copy_to(sums);
        }
#endif
        Ints sum[SHARES][SUMS];
        written_out<ROWS>([&](int row) ALWAYS_INLINE {
            Ints start = Ints::start_of_fours(x.term(row, group, 0));
            written_out<VECTORS>([&](int i) ALWAYS_INLINE { sum[0][row * VECTORS + i] = start; });
        });
#pragma GCC unroll 1
        for (int64_t k = 0; k < size; k += 4 * SHARES) {
            written_out<SHARES>([&](int share) ALWAYS_INLINE {
                if (ROWS > ONE_STREAM) soon.ask_for<PANELS>((k + 4 * share) * LINE_OF_K);
                written_out<ROWS>([&](int row) ALWAYS_INLINE {
                    Ints four = Ints::repeat32(four_at(numbers + row * stride));
                    written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                        Ints w = Ints::load(vector_at(block, apart, i, Ints::BYTES)),
                             &s = sum[share][row * VECTORS + i];
                        s = settled(Ints::add_fours(s, w, four));
                    });
                });
                block += 4 * PANEL, numbers += 4;
            });
        }
        written_out<SUMS>([&](int i) ALWAYS_INLINE {
            sums[i] = sum[0][i];
            written_out<SHARES - 1>(
                [&](int share) ALWAYS_INLINE { sums[i] = Ints::add(sums[i], sum[share + 1][i]); });
        });
    }
};

// One half of a group after the other if the sums of both do not fit the registers.
struct Int4Dot {
    static constexpr bool OWN_SCALES = false;
    static constexpr int MAX_DIRECT_ROWS = MAX_EXACT_SUMS / 2;
    static constexpr int64_t GROUP = GROUP_INT4, UNDER_SCALE = GROUP, DEPTH = 64, SCALED = GROUP,
                             LINE_OF_K = PANEL / 2, BLOCK = GROUP * LINE_OF_K, SCALES = SCALES_INT4,
                             SCALES_AT = FACTORS, TERMS = 2;
    static constexpr int ONE_STREAM = 0;  // measured: one row is a tenth slower as one stream
    static void terms(const int8_t* numbers, const float*, int32_t* to) {
        for (int half = 0; half < 2; half++)
            to[half] = -8 * sum_of(numbers + half * HALF_GROUP, HALF_GROUP) & 0xffff;
    }

    // In 16 bits a pair's products are within 2 * 15 * 127; sums over half a group plus the
    // complete offset are within 32 * 8 * 127.
    template <int ROWS, int PANELS>
    static ALWAYS_INLINE void dot(const char* block, int64_t apart, const char* factors,
                                  int64_t factors_apart, const QuantizedRows<Int4Dot>& x,
                                  int64_t group, int64_t, const Blocks& soon, Ints* sums) {
        constexpr int VECTORS = PANELS * PARTS, SUMS = ROWS * VECTORS,
                      HALVES = 2 * SUMS > MAX_EXACT_SUMS ? 1 : 2,
                      SHARES = HALVES * SUMS < 4 ? 2 : 1;
        const int64_t stride = x.groups * GROUP;
        written_out<2 / HALVES>([&](int pass) ALWAYS_INLINE {
            const int8_t* numbers = x.numbers + group * GROUP + pass * HALF_GROUP;
            Ints sum[HALVES][SHARES][SUMS];
            written_out<HALVES>([&](int half) ALWAYS_INLINE {
                written_out<ROWS>([&](int row) ALWAYS_INLINE {
                    Ints offset = Ints::repeat32(x.term(row, group, pass + half));
                    written_out<VECTORS>(
                        [&](int i) ALWAYS_INLINE { sum[half][0][row * VECTORS + i] = offset; });
                });
            });
            const char* weights = block;
#pragma GCC unroll 1
            for (int64_t k = 0; k < HALF_GROUP; k += 4 * SHARES) {
                written_out<SHARES>([&](int share) ALWAYS_INLINE {
                    if (ROWS > ONE_STREAM && pass == 0)
                        soon.ask_for<PANELS>((k + 4 * share) * PANEL);
                    written_out<HALVES>([&](int half) ALWAYS_INLINE {
                        written_out<ROWS>([&](int row) ALWAYS_INLINE {
                            Ints four =
                                Ints::repeat32(four_at(numbers + row * stride + half * HALF_GROUP));
                            written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                                Ints both = Ints::load(vector_at(weights, apart, i, Ints::BYTES)),
                                     &s = sum[half][share][row * VECTORS + i];
                                s = settled(Ints::add_nibbles(
                                    s, pass + half ? both.high_nibbles() : both.low_nibbles(),
                                    four));
                            });
                        });
                    });
                    weights += 4 * PANEL, numbers += 4;
                });
            }
            written_out<HALVES>([&](int half) ALWAYS_INLINE {
                written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                    Ints factor = Ints::factors(
                        (const int8_t*)vector_at(factors, factors_apart, i, Vec::LANES) +
                        (pass + half) * PANEL);
                    written_out<SHARES>([&](int share) ALWAYS_INLINE {
                        written_out<ROWS>([&](int row) ALWAYS_INLINE {
                            Ints& s = sums[row * VECTORS + i];
                            s = Ints::add_halves(pass + half + share ? s : Ints(),
                                                 sum[half][share][row * VECTORS + i], factor);
                        });
                    });
                });
            });
        });
    }
};
