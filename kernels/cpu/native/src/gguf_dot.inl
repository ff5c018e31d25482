// Linear layers directly on GGUF's blocks. Included by quantized.inl.
// kernels/reference/gguf_linear.py specifies the arithmetic, kernels/cpu/native/gguf.py lays out
// panels of 16 outputs:
//
//   numbers  a block's bytes of numbers as 4-byte words, [word][16 outputs][4], in the file's order
//            (Q5_K: the high bits first)
//   scales   by block, in another array; fp16 [16 outputs] each:
//            Q8_0, Q4_0: d. Q4_1: d, m. Q4_K, Q5_K: d, dmin, then three words [16][4] of 6-bit
//            scales. Q6_K: four words [16][4] of scales, then d.
//
// x is quantized in groups of 256. A block's sum of products is an exact integer. Within a group,
// blocks are added in ascending order, times their scales; then the group is added, times
// x's scale.

constexpr int64_t GROUP_BLOCKS = 256, BLOCK_SIZE = 32, BLOCKS = GROUP_BLOCKS / BLOCK_SIZE;

// Sums of 8 numbers each, for a group of 256
struct SumsOf8 {
    int32_t at[GROUP_BLOCKS / 8];

    explicit SumsOf8(const int8_t* numbers) {
        alignas(32) int64_t sums[4];
        for (int64_t i = 0; i < GROUP_BLOCKS / 8; i += 4, numbers += 32) {
            __m256i from_0 = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)numbers),
                                              _mm256_set1_epi8((char)0x80));
            _mm256_store_si256((__m256i*)sums, _mm256_sad_epu8(from_0, _mm256_setzero_si256()));
            for (int64_t j = 0; j < 4; j++) at[i + j] = (int32_t)sums[j] - 128 * 8;
        }
    }
    int32_t of_16(int64_t i) const { return at[2 * i] + at[2 * i + 1]; }
    int32_t of_32(int64_t i) const { return of_16(2 * i) + of_16(2 * i + 1); }
};

inline float half_at(const char* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}

// The fp16 numbers of vector i of a panel's outputs, `at` bytes into its scales
inline Vec half_scales(const char* scales, int64_t apart, int i, int64_t at) {
    return Vec::load_halves(vector_at(scales, apart, i, Vec::LANES * 2) + at);
}
inline Ints scale_words(const char* scales, int64_t apart, int i, int64_t at) {
    return Ints::load(vector_at(scales, apart, i, Ints::BYTES) + at);
}

// What blocks of 32 with their own fp16 scales have in common. A group may have fewer than 8.
template <int64_t NUMBERS, int64_t ALL_SCALES>
struct SmallBlocks {
    static constexpr bool OWN_SCALES = true;
    static constexpr int64_t GROUP = GROUP_BLOCKS, DEPTH = BLOCK_SIZE, SCALED = BLOCK_SIZE,
                             LINE_OF_K = PANEL * NUMBERS / BLOCK_SIZE, BLOCK = GROUP * LINE_OF_K,
                             SCALES = BLOCKS * ALL_SCALES, TERMS = BLOCKS;
    static constexpr int ONE_STREAM = 0;

    // exact(block's index, sums) computes one block's exact sums, whose weights come next;
    // combine(sum, scales, i, row, block, of the group) -> of the group
    template <int ROWS, int PANELS, typename Exact, typename Combine, typename X>
    static ALWAYS_INLINE void add_blocks(const char* scales, const X& x, int64_t group,
                                         int64_t size, decltype(Vec::v)* total, Exact exact,
                                         Combine combine) {
        constexpr int VECTORS = PANELS * PARTS, SUMS = ROWS * VECTORS;
        decltype(Vec::v) part[SUMS];
        for (auto& sum : part) sum = Vec().v;
#pragma GCC unroll 1
        for (int64_t block = 0; block < size / BLOCK_SIZE; block++, scales += ALL_SCALES) {
            Ints sum[SUMS];
            exact(block, sum);
            written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                written_out<ROWS>([&](int row) ALWAYS_INLINE {
                    auto& of_group = part[row * VECTORS + i];
                    of_group =
                        combine(sum[row * VECTORS + i], scales, i, row, block, Vec(of_group)).v;
                });
            });
        }
        written_out<ROWS>([&](int row) ALWAYS_INLINE {
            const Vec scale(x.scales[row * x.groups + group]);
            written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                auto& sum = total[row * VECTORS + i];
                sum = Vec::fma(Vec(part[row * VECTORS + i]), scale, Vec(sum)).v;
            });
        });
    }
};

struct Q8_0 : SmallBlocks<32, 2 * PANEL> {
    static void terms(const int8_t* numbers, int32_t* to) {
        const SumsOf8 sums(numbers);
        for (int64_t i = 0; i < TERMS; i++) to[i] = -128 * sums.of_32(i);
    }

    template <int ROWS, int PANELS>
    static ALWAYS_INLINE void add(const char* block, int64_t apart, const char* scales,
                                  int64_t scales_apart, const QuantizedRows<Q8_0>& x, int64_t group,
                                  int64_t size, const Blocks& soon, decltype(Vec::v)* total) {
        constexpr int VECTORS = PANELS * PARTS;
        const int64_t stride = x.groups * GROUP;
        const int8_t* numbers = x.numbers + group * GROUP;
        auto exact = [&](int64_t index, Ints* sum) ALWAYS_INLINE {
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                Ints start = Ints::start_of_fours(x.term(row, group, index));
                written_out<VECTORS>([&](int i) ALWAYS_INLINE { sum[row * VECTORS + i] = start; });
            });
            written_out<BLOCK_SIZE / 4>([&](int line) ALWAYS_INLINE {
                soon.ask_for<PANELS>((index * BLOCK_SIZE + 4 * line) * LINE_OF_K);
                written_out<ROWS>([&](int row) ALWAYS_INLINE {
                    Ints four = Ints::repeat32(four_at(numbers + row * stride + 4 * line));
                    written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                        Ints w = Ints::load(vector_at(block, apart, i, Ints::BYTES) +
                                            4 * line * LINE_OF_K),
                             &s = sum[row * VECTORS + i];
                        s = settled(Ints::add_fours(s, w, four));
                    });
                });
            });
            block += BLOCK_SIZE * LINE_OF_K, numbers += BLOCK_SIZE;
        };
        auto combine = [&](Ints sum, const char* scales, int i, int, int64_t,
                           Vec of_group) ALWAYS_INLINE {
            return Vec::fma(sum.to_floats(), half_scales(scales, scales_apart, i, 0), of_group);
        };
        add_blocks<ROWS, PANELS>(scales, x, group, size, total, exact, combine);
    }

    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        return half_at(scales + 2 * (k / BLOCK_SIZE * PANEL + lane)) *
               (float)(int8_t)numbers[4 * (k / 4 * PANEL + lane) + k % 4];
    }
};

// Byte i of a block has number i in its low nibble and number i + 16 in its high one. Q4_0's
// numbers are stored plus 8; Q4_1's block has a least weight m.
template <bool LEAST_WEIGHT>
struct Q4 : SmallBlocks<16, (LEAST_WEIGHT ? 4 : 2) * PANEL> {
    using Base = SmallBlocks<16, (LEAST_WEIGHT ? 4 : 2) * PANEL>;
    static constexpr int64_t HALF = BLOCK_SIZE / 2;

    static void terms(const int8_t* numbers, int32_t* to) {
        const SumsOf8 sums(numbers);
        for (int64_t i = 0; i < Base::TERMS; i++)
            to[i] = LEAST_WEIGHT ? sums.of_32(i) : -8 * sums.of_32(i);
    }

    template <int ROWS, int PANELS>
    static ALWAYS_INLINE void add(const char* block, int64_t apart, const char* scales,
                                  int64_t scales_apart, const QuantizedRows<Q4>& x, int64_t group,
                                  int64_t size, const Blocks& soon, decltype(Vec::v)* total) {
        constexpr int VECTORS = PANELS * PARTS;
        const int64_t stride = x.groups * Base::GROUP;
        const int8_t* numbers = x.numbers + group * Base::GROUP;
        auto exact = [&](int64_t index, Ints* sum) ALWAYS_INLINE {
            written_out<ROWS * VECTORS>([&](int i) ALWAYS_INLINE { sum[i] = Ints(); });
            written_out<HALF / 4>([&](int line) ALWAYS_INLINE {
                soon.ask_for<PANELS>((index * HALF + 4 * line) * PANEL);
                written_out<2>([&](int half) ALWAYS_INLINE {
                    written_out<ROWS>([&](int row) ALWAYS_INLINE {
                        Ints four = Ints::repeat32(
                            four_at(numbers + row * stride + half * HALF + 4 * line));
                        written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                            Ints both = Ints::load(vector_at(block, apart, i, Ints::BYTES) +
                                                   4 * line * PANEL),
                                 &s = sum[row * VECTORS + i];
                            s = settled(Ints::add_nibbles(
                                s, half ? both.high_nibbles() : both.low_nibbles(), four));
                        });
                    });
                });
            });
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                const Ints term = Ints::repeat32(x.term(row, group, index));
                written_out<VECTORS>([&](int i) ALWAYS_INLINE {
                    Ints& s = sum[row * VECTORS + i];
                    s = s.whole();
                    if (!LEAST_WEIGHT) s = Ints::add(s, term);
                });
            });
            block += HALF * PANEL, numbers += BLOCK_SIZE;
        };
        auto combine = [&](Ints sum, const char* scales, int i, int row, int64_t index,
                           Vec of_group) ALWAYS_INLINE {
            of_group = Vec::fma(sum.to_floats(), half_scales(scales, scales_apart, i, 0), of_group);
            if (!LEAST_WEIGHT) return of_group;
            return Vec::fma(Vec((float)x.term(row, group, index)),
                            half_scales(scales, scales_apart, i, 2 * PANEL), of_group);
        };
        Base::template add_blocks<ROWS, PANELS>(scales, x, group, size, total, exact, combine);
    }

    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        const int64_t block = k / BLOCK_SIZE, i = k % BLOCK_SIZE, byte = i % HALF;
        const uint8_t both =
            (uint8_t)numbers[block * HALF * PANEL + 4 * (byte / 4 * PANEL + lane) + byte % 4];
        const float number = (float)(both >> (i < HALF ? 0 : 4) & 15);
        scales += block * (LEAST_WEIGHT ? 4 : 2) * PANEL + 2 * lane;
        return LEAST_WEIGHT ? half_at(scales) * number + half_at(scales + 2 * PANEL)
                            : half_at(scales) * (number - 8);
    }
};
using Q4_0 = Q4<false>;
using Q4_1 = Q4<true>;
