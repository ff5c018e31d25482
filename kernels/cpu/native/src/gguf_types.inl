// The types of blocks that linear layers multiply (gguf_dot.inl): how a block stores
// numbers, scales and least weights. Included by quantized.inl. kernels/cpu/native/gguf.py lays
// out panels of 16 outputs:
//
//   numbers  a block's bytes of numbers as 4-byte words, [word][16 outputs][4], in the file's order
//            (Q5_0, Q5_1, Q5_K: the high bits first)
//   scales   by block, in another array; fp16 [16 outputs] each:
//            Q8_0, Q4_0, Q5_0, IQ4_NL, INT2_*: d. Q4_1, Q5_1: d, m. Q4_K, Q5_K: d, dmin, then
//            three words [16][4] of 6-bit scales. Q6_K: four words [16][4] of scales, then d.
//            INT4_*: a word. MXFP4: a byte, the exponent.
//
// weight = scale * (stored number - ZERO) + least. Each type F has
//   stored(numbers of a vector of outputs, sub, i, line)
//       four numbers of each output: line `line` of part sub + i of the block's parts of 32, where
//       i is known to the compiler and sub a multiple of WRITTEN_OUT
//   decode(scales, scales of all parts, leasts of all parts)
//   weight(...)  one weight, dequantized with the roundings of the reference

constexpr int64_t GROUP_BLOCKS = 256, BLOCK_SIZE = 32, BLOCKS = GROUP_BLOCKS / BLOCK_SIZE,
                  WORDS = 4 * PANEL;  // bytes of a panel's words

inline float half_at(const char* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return float_of_half(bits);
}
inline float float_of(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// A block's scales, for vector v of the outputs
struct BlockScales {
    const char* data;
    int64_t apart;
    int v;

    Vec halves(int64_t at) const {
        return Vec::load_halves(vector_at(data, apart, v, Vec::LANES * 2) + at);
    }
    Ints words(int64_t at) const { return Ints::load(vector_at(data, apart, v, Ints::BYTES) + at); }
};

// What the arithmetic needs to know of a type. On instruction sets that sum in 32 bits, types that
// differ in their largest number alone are one kind.
template <int MOST_STORED, bool HAS_ZERO, bool HAS_LEAST, int PARTS_BESIDE>
struct BlockKind {
    static constexpr bool SIGNED = MOST_STORED == 127, OFFSET = HAS_ZERO, LEAST = HAS_LEAST;
    static constexpr int MOST = MOST_STORED, PARTS_OF_32 = PARTS_BESIDE;
    static constexpr int64_t GROUP = GROUP_BLOCKS, UNDER_SCALE = BLOCK_SIZE,
                             TERMS = BLOCKS * PARTS_OF_32;
};

// COLUMNS numbers are a block, of so many bytes of numbers and of scales. Stored numbers are at
// most MOST_STORED, or signed bytes.
template <int64_t COLUMNS, int64_t NUMBER_BYTES, int64_t SCALE_BYTES, int MOST_STORED, int LESS,
          bool HAS_LEAST = false, int PARTS_BESIDE = 1>
struct BlockType : BlockKind<MOST_STORED, LESS != 0, HAS_LEAST, PARTS_BESIDE> {
    using Own = BlockKind<MOST_STORED, LESS != 0, HAS_LEAST, PARTS_BESIDE>;
    using Kind = std::conditional_t<Ints::SUMS_OF_HALVES || Own::SIGNED, Own,
                                    BlockKind<15, LESS != 0, HAS_LEAST, PARTS_BESIDE>>;
    using Own::GROUP, Own::SIGNED, Own::LEAST, Own::PARTS_OF_32, Own::TERMS;
    static constexpr bool OWN_SCALES = true;
    static constexpr int64_t DEPTH = COLUMNS, SCALED = COLUMNS,
                             LINE_OF_K = PANEL * NUMBER_BYTES / COLUMNS, BLOCK = GROUP * LINE_OF_K,
                             BLOCK_SCALES = PANEL * SCALE_BYTES,
                             SCALES = GROUP / COLUMNS * BLOCK_SCALES;
    // Rows that are multiplied by blocks at once, and at all; more by unpacked panels. With 16
    // registers, many rows do not pay for bits above nibbles.
    static constexpr int MAX_DIRECT_ROWS = Vec::LANES == 16 ? 8 : 4;
    static constexpr bool HAS_NO_UPPER_BITS = MOST_STORED == 15 || Own::SIGNED;
    static constexpr int64_t MOST_DIRECT_ROWS = Vec::LANES == 16 ? 16 : HAS_NO_UPPER_BITS ? 8 : 3;
    // The scales of large blocks take the registers of a second panel's sums.
    static constexpr int MOST_PANELS = COLUMNS == GROUP_BLOCKS ? 1 : MAX_EXACT_SUMS;
    static constexpr int ONE_STREAM = 0, ZERO = LESS, SUBS = COLUMNS / BLOCK_SIZE, WRITTEN_OUT = 1;

    // What removes ZERO from an exact sum; or the sum of x, which the least weight multiplies.
    static void terms(const int8_t* numbers, const float* scales, int32_t* to) {
        int32_t sums[GROUP / 8];  // of 8 numbers
        for (int64_t i = 0; i < GROUP / 8; i += 4) sums_of_8(numbers + 8 * i, sums + i);
        constexpr int64_t OF_PART = BLOCK_SIZE / PARTS_OF_32 / 8;
        for (int64_t i = 0; i < TERMS; i++) {
            int32_t sum = 0;
            for (int64_t j = 0; j < OF_PART; j++) sum += sums[i * OF_PART + j];
            if (LEAST) {
                const float scaled = (float)sum * scales[i];
                std::memcpy(to + i, &scaled, 4);
            } else {
                to[i] = -(SIGNED ? 128 : ZERO) * sum;
            }
        }
    }
};

// Types of 32 numbers: a scale and perhaps a least weight in fp16
template <int64_t NUMBER_BYTES, int MOST, int ZERO, bool LEAST = false,
          int64_t SCALE_BYTES = LEAST ? 4 : 2>
struct SmallBlock : BlockType<BLOCK_SIZE, NUMBER_BYTES, SCALE_BYTES, MOST, ZERO, LEAST> {
    static ALWAYS_INLINE void decode(const BlockScales& from, Vec* scales, Vec* leasts) {
        *scales = from.halves(0);
        if (LEAST) *leasts = from.halves(2 * PANEL);
    }
    // number: as stored
    static float scaled(int number, const char* scales, int64_t lane, int64_t k) {
        scales += k / BLOCK_SIZE * SCALE_BYTES * PANEL + 2 * lane;
        const float product = half_at(scales) * (float)(number - ZERO);
        return LEAST ? product + half_at(scales + 2 * PANEL) : product;
    }
    // byte `at` of the block of number k
    static uint8_t byte_of(const char* numbers, int64_t lane, int64_t k, int64_t at) {
        return (uint8_t)
            numbers[k / BLOCK_SIZE * NUMBER_BYTES * PANEL + at / 4 * WORDS + 4 * lane + at % 4];
    }
    // Byte i has number i in its low nibble and number i + 16 in its high one.
    static int nibble_of(const char* numbers, int64_t lane, int64_t k, int64_t begin) {
        const int64_t i = k % BLOCK_SIZE;
        return byte_of(numbers, lane, k, begin + i % 16) >> (i < 16 ? 0 : 4) & 15;
    }
    static ALWAYS_INLINE Ints nibbles(const char* numbers, int line) {
        const Ints both = Ints::load(numbers + line % 4 * WORDS);
        return line < 4 ? both.low_nibbles() : both.high_nibbles();
    }
};

struct Q8_0 : SmallBlock<32, 127, 0> {
    static ALWAYS_INLINE Ints stored(const char* numbers, int, int, int line) {
        return Ints::load(numbers + line * WORDS).for_add_bytes();
    }
    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        return scaled((int8_t)byte_of(numbers, lane, k, k % BLOCK_SIZE), scales, lane, k);
    }
};

template <int ZERO, bool LEAST>
struct Q4 : SmallBlock<16, 15, ZERO, LEAST> {
    using Base = SmallBlock<16, 15, ZERO, LEAST>;
    static ALWAYS_INLINE Ints stored(const char* numbers, int, int, int line) {
        return Base::nibbles(numbers, line);
    }
    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        return Base::scaled(Base::nibble_of(numbers, lane, k, 0), scales, lane, k);
    }
};
using Q4_0 = Q4<8, false>;
using Q4_1 = Q4<0, true>;

// weight = scale * (number - zero). A word is the scale in fp32, whose lowest byte is the zero.
template <int64_t COLUMNS>
struct Int4 : BlockType<COLUMNS, COLUMNS / 2, 4, 15, 0, true> {
    using Base = BlockType<COLUMNS, COLUMNS / 2, 4, 15, 0, true>;
    static ALWAYS_INLINE Ints stored(const char* numbers, int sub, int i, int line) {
        const Ints both = Ints::load(numbers + ((sub + i) * 4 + line % 4) * WORDS);
        return line < 4 ? both.low_nibbles() : both.high_nibbles();
    }
    static ALWAYS_INLINE void decode(const BlockScales& from, Vec* scales, Vec* leasts) {
        const Ints word = from.words(0);
        const Vec scale = word.upper_as_floats(),
                  least = (Vec() - word.byte(0).to_floats()) * scale;
        written_out<Base::SUBS>([&](int i) ALWAYS_INLINE { scales[i] = scale, leasts[i] = least; });
    }
    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        const int64_t i = k % BLOCK_SIZE, byte = k / BLOCK_SIZE * 16 + i % 16;
        const uint8_t both = (uint8_t)numbers[byte / 4 * WORDS + 4 * lane + byte % 4];
        int32_t word;
        std::memcpy(&word, scales + k / COLUMNS * WORDS + 4 * lane, 4);
        return float_of(word & ~255) *
               ((float)(both >> (i < 16 ? 0 : 4) & 15) - (float)(word & 255));
    }
};
using INT4_32 = Int4<32>;
using INT4_128 = Int4<128>;

// Numbers of 2 bits, less one. Byte i of 32 numbers' eight has numbers i, i + 8, i + 16 and i + 24.
template <int64_t COLUMNS>
struct Int2 : BlockType<COLUMNS, COLUMNS / 4, 2, 15, 1> {
    using Base = BlockType<COLUMNS, COLUMNS / 4, 2, 15, 1>;
    static ALWAYS_INLINE Ints stored(const char* numbers, int sub, int i, int line) {
        return Ints::load(numbers + ((sub + i) * 2 + line % 2) * WORDS).two_bits(line / 2 * 2);
    }
    static ALWAYS_INLINE void decode(const BlockScales& from, Vec* scales, Vec*) {
        const Vec scale = from.halves(0);
        written_out<Base::SUBS>([&](int i) ALWAYS_INLINE { scales[i] = scale; });
    }
    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        const int64_t i = k % BLOCK_SIZE, byte = k / BLOCK_SIZE * 8 + i % 8;
        const int four = (uint8_t)numbers[byte / 4 * WORDS + 4 * lane + byte % 4];
        return half_at(scales + k / COLUMNS * Base::BLOCK_SCALES + 2 * lane) *
               (float)((four >> (i / 8 * 2) & 3) - 1);
    }
};
using INT2_64 = Int2<64>;
using INT2_128 = Int2<128>;

// Bit i of the first word is the fifth bit of number i.
template <int ZERO, bool LEAST>
struct Q5 : SmallBlock<20, 31, ZERO, LEAST> {
    using Base = SmallBlock<20, 31, ZERO, LEAST>;
    static ALWAYS_INLINE Ints stored(const char* numbers, int, int, int line) {
        return Ints::with_fifth_bits(Base::nibbles(numbers + WORDS, line),
                                     Ints::load(numbers).byte_in_all(line / 2),
                                     Ints::repeat32(line % 2 ? (int)0x80402010 : 0x08040201));
    }
    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        const int64_t i = k % BLOCK_SIZE;
        const int high = Base::byte_of(numbers, lane, k, i / 8) >> (i % 8) & 1;
        return Base::scaled(Base::nibble_of(numbers, lane, k, 4) | high << 4, scales, lane, k);
    }
};
using Q5_0 = Q5<16, false>;
using Q5_1 = Q5<0, true>;

struct IQ4_NL : SmallBlock<16, 127, 0> {
    alignas(16) static constexpr int8_t NUMBERS[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                       1,    13,   25,  38,  53,  69,  89,  113};
    static ALWAYS_INLINE Ints stored(const char* numbers, int, int, int line) {
        return nibbles(numbers, line).look_up(NUMBERS).for_add_bytes();
    }
    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        return scaled(NUMBERS[nibble_of(numbers, lane, k, 0)], scales, lane, k);
    }
};

// A number is 4 bits of E2M1, doubled to be whole; 12 is added, so that it has no sign. A scale is
// a power of two, halved: 2**(byte - 128).
struct MXFP4 : SmallBlock<16, 31, 12, false, 1> {
    alignas(16) static constexpr int8_t NUMBERS[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                       12, 11, 10, 9,  8,  6,  4,  0};
    static ALWAYS_INLINE Ints stored(const char* numbers, int, int, int line) {
        return nibbles(numbers, line).look_up(NUMBERS);
    }
    static ALWAYS_INLINE void decode(const BlockScales& from, Vec* scales, Vec*) {
        *scales =
            Ints::load_bytes(vector_at(from.data, from.apart, from.v, Vec::LANES)).halved_powers();
    }
    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        const int32_t exponent = (uint8_t)scales[k / BLOCK_SIZE * PANEL + lane],
                      bits = exponent < 2 ? 0x200000 << exponent : (exponent - 1) << 23;
        return float_of(bits) * (float)(NUMBERS[nibble_of(numbers, lane, k, 0)] - 12);
    }
};

// Q4_K and Q5_K: eight scales and eight minima of 6 bits, packed into three words. Two parts of 32
// share bytes; a byte of high bits has one of each part.
template <bool FIVE_BITS>
struct Q45K : BlockType<256, FIVE_BITS ? 160 : 128, 16, FIVE_BITS ? 31 : 15, 0, true> {
    using Base = BlockType<256, FIVE_BITS ? 160 : 128, 16, FIVE_BITS ? 31 : 15, 0, true>;
    static constexpr int WRITTEN_OUT = 2;
    static constexpr int64_t NIBBLES = FIVE_BITS ? 8 * WORDS : 0;  // after the high bits

    static ALWAYS_INLINE Ints stored(const char* numbers, int sub, int i, int line) {
        const Ints both = Ints::load(numbers + NIBBLES + (sub / 2 * 8 + line) * WORDS),
                   nibbles = i ? both.high_nibbles() : both.low_nibbles();
        if constexpr (!FIVE_BITS) return nibbles;
        else
            return Ints::with_fifth_bits(nibbles, Ints::load(numbers + line * WORDS),
                                         Ints::repeat32(0x01010101 << (sub + i)));
    }

    static ALWAYS_INLINE void decode(const BlockScales& from, Vec* scales, Vec* leasts) {
        const Vec scale = from.halves(0), least = Vec() - from.halves(2 * PANEL);
        const Ints first = from.words(WORDS), second = from.words(2 * WORDS),
                   rest = from.words(3 * WORDS);
        const Ints words[] = {first.low_six(), Ints::joined_six(rest.low_nibbles(), first),
                              second.low_six(), Ints::joined_six(rest.high_nibbles(), second)};
        written_out<8>([&](int i) ALWAYS_INLINE {
            scales[i] = words[i / 4].byte(i % 4).to_floats() * scale;
            leasts[i] = words[2 + i / 4].byte(i % 4).to_floats() * least;
        });
    }

    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        numbers += k / 256 * 256 * Base::LINE_OF_K + 4 * lane;
        scales += k / 256 * Base::SCALES, k %= 256;
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

// Two scales of 8 bits per 32 numbers. A byte of low bits has numbers i and i + 64 of 128, a byte
// of high ones i, i + 32, i + 64 and i + 96.
struct Q6_K : BlockType<256, 192, 18, 63, 32, false, 2> {
    static constexpr int WRITTEN_OUT = 4;
    static constexpr int64_t HIGH = 32 * WORDS;

    static ALWAYS_INLINE Ints stored(const char* numbers, int sub, int i, int line) {
        const int half = sub / 4;
        const Ints both = Ints::load(numbers + (half * 16 + i % 2 * 8 + line) * WORDS);
        return Ints::with_upper_bits(i < 2 ? both.low_nibbles() : both.high_nibbles(),
                                     Ints::load(numbers + HIGH + (half * 8 + line) * WORDS), i * 2);
    }

    static ALWAYS_INLINE void decode(const BlockScales& from, Vec* scales, Vec*) {
        const Vec scale = from.halves(4 * WORDS);
        written_out<4>([&](int word) ALWAYS_INLINE {
            const Ints four = from.words(word * WORDS);
            written_out<4>([&](int i) ALWAYS_INLINE {
                scales[4 * word + i] = four.signed_byte(i).to_floats() * scale;
            });
        });
    }

    static float weight(const char* numbers, const char* scales, int64_t lane, int64_t k) {
        numbers += k / 256 * BLOCK + 4 * lane, scales += k / 256 * SCALES, k %= 256;
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

#define FOR_BLOCK_TYPES(DO) \
    DO(Q8_0);               \
    DO(Q4_0);               \
    DO(Q4_1);               \
    DO(Q5_0);               \
    DO(Q5_1);               \
    DO(IQ4_NL);             \
    DO(MXFP4);              \
    DO(Q4_K);               \
    DO(Q5_K);               \
    DO(Q6_K);               \
    DO(INT4_32);            \
    DO(INT4_128);           \
    DO(INT2_64);            \
    DO(INT2_128);

// out [rows, size] = rows of a table of blocks for the step's token ids, dequantized
template <typename T, typename F>
void embedding_of_blocks(const EmbeddingInt8& a, int64_t rows, const Step& step,
                         const Worker& worker) {
    const int64_t piece = piece_of_rows(a.size);
    for (int64_t start; (start = worker.next(ceil_div(rows, piece)) * piece) < rows;)
        for (int64_t row = start; row < std::min(start + piece, rows); row++) {
            const int64_t id = id_of(a, step, row), panel = id / PANEL;
            T* out = (T*)a.out + row * a.out_row;
            if (id < 0 || id >= a.num_ids) {
                set_absent(a, out, a.size * sizeof(T));
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
