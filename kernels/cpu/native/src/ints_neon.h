// Vectors of 32 bytes of integers in two NEON registers. The names are those of ints_avx2.h.
// Include after vec_neon.h.
#pragma once

constexpr int MAX_EXACT_SUMS = 12;  // of two of the 32 registers

struct TwoInts {
    uint8x16_t low, high;
};

struct Ints {
    static constexpr int BYTES = 32;
    TwoInts v;
    Ints() : v{vdupq_n_u8(0), vdupq_n_u8(0)} {}
    Ints(TwoInts x) : v(x) {}
    Ints(uint8x16_t low, uint8x16_t high) : v{low, high} {}
    Ints(int32x4_t low, int32x4_t high)
        : v{vreinterpretq_u8_s32(low), vreinterpretq_u8_s32(high)} {}

    static Ints load(const void* p) {
        return {vld1q_u8((const uint8_t*)p), vld1q_u8((const uint8_t*)p + 16)};
    }
    void store(void* p) const { vst1q_u8((uint8_t*)p, v.low), vst1q_u8((uint8_t*)p + 16, v.high); }
    static Ints repeat32(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
    Ints low_nibbles() const {
        return each([](uint8x16_t x) { return vandq_u8(x, vdupq_n_u8(15)); });
    }
    Ints high_nibbles() const {
        return each([](uint8x16_t x) { return vshrq_n_u8(x, 4); });
    }

    // Bytes within +-127, in 32 bits: sum + w0 * x0 + ... + w3 * x3; and the initial value that
    // makes such a sum correct once all of x is added.
    static Ints start_of_fours(int32_t) { return Ints(); }
    static Ints add_fours(Ints sum, Ints w, Ints x) {
        return {dot(sum.words(0), w.v.low, x.v.low), dot(sum.words(1), w.v.high, x.v.high)};
    }
    // The same for unsigned nibbles
    static Ints add_nibbles(Ints sum, Ints nibbles, Ints x) { return add_fours(sum, nibbles, x); }
    // BYTES / 4 factors in the form that add_halves takes: sum + the lower 16 bits, signed, of each
    // of `halves` * factor, in 32 bits
    static Ints factors(const int8_t* p) {
        const int16x8_t x = vmovl_s8(vld1_s8(p));
        return {vmovl_s16(vget_low_s16(x)), vmovl_s16(vget_high_s16(x))};
    }
    static Ints add_halves(Ints sum, Ints halves, Ints factors) {
        const auto half = [&](int i) {
            return vmlal_s16(sum.words(i), vmovn_s32(halves.words(i)), vmovn_s32(factors.words(i)));
        };
        return {half(0), half(1)};
    }
    Ints whole() const { return v; }

    // For GGUF's blocks: add_fours in two steps; the first one depends on the weights alone
    Ints for_add_bytes() const { return v; }
    static Ints add_bytes(Ints sum, Ints w, Ints x) { return add_fours(sum, w, x); }
    static constexpr bool SUMS_OF_HALVES = false;
    static constexpr int run_of(int, int lines) { return lines; }
    // Words without their lowest bytes, as numbers in fp32
    Vec upper_as_floats() const {
        const int32x4_t lowest = vdupq_n_s32(255);
        return {vreinterpretq_f32_s32(vbicq_s32(words(0), lowest)),
                vreinterpretq_f32_s32(vbicq_s32(words(1), lowest))};
    }
    // Bytes in 32 bits: byte i of each
    Ints byte(int i) const {
        const auto half = [=](int32x4_t x) {
            return (int32x4_t)((uint32x4_t)x >> 8 * i) & vdupq_n_s32(255);
        };
        return {half(words(0)), half(words(1))};
    }
    Ints signed_byte(int i) const {
        const auto half = [=](int32x4_t x) { return (x << (24 - 8 * i)) >> 24; };
        return {half(words(0)), half(words(1))};
    }
    // BYTES / 4 bytes in 32 bits; 2**(x - 128) of such, as their bits: the least two are subnormal
    static Ints load_bytes(const void* p) {
        const uint16x8_t x = vmovl_u8(vld1_u8((const uint8_t*)p));
        return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(x))),
                vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(x)))};
    }
    Vec halved_powers() const {
        const int32x4_t one = vdupq_n_s32(1);
        const auto half = [=](int32x4_t x) {
            const int32x4_t least = vshlq_n_s32(vaddq_s32(vminq_s32(x, one), one), 21);
            return vreinterpretq_f32_s32(vmaxq_s32(vshlq_n_s32(vsubq_s32(x, one), 23), least));
        };
        return {half(words(0)), half(words(1))};
    }
    // table [16], at an address divisible by 16, of nibbles
    Ints look_up(const int8_t* table) const {
        const uint8x16_t entries = vreinterpretq_u8_s8(vld1q_s8(table));
        return each([=](uint8x16_t x) { return vqtbl1q_u8(entries, x); });
    }
    // Bits `shift` and shift + 1 of each byte
    Ints two_bits(int shift) const {
        return each([=](uint8x16_t x) { return (x >> shift) & vdupq_n_u8(3); });
    }
    // Bits 0 to 5 of each byte; four bits with the upper two of another byte above them
    Ints low_six() const {
        return each([](uint8x16_t x) { return vandq_u8(x, vdupq_n_u8(63)); });
    }
    static Ints joined_six(Ints nibbles, Ints top) {
        return nibbles |
               top.each([](uint8x16_t x) { return vandq_u8(vshrq_n_u8(x, 2), vdupq_n_u8(48)); });
    }
    // nibble | (high >> shift & 3) << 4 in bytes; shift is even
    static Ints with_upper_bits(Ints nibbles, Ints high, int shift) {
        return nibbles | high.each([=](uint8x16_t x) {
            return (shift < 4 ? x << (4 - shift) : x >> (shift - 4)) & vdupq_n_u8(48);
        });
    }
    // Byte i of each word, four times; nibble + 16 in bytes where `high` has the one bit of `bits`
    Ints byte_in_all(int i) const {
        const uint8x16_t first = {0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12};
        const uint8x16_t places = vaddq_u8(first, vdupq_n_u8((uint8_t)i));
        return each([=](uint8x16_t x) { return vqtbl1q_u8(x, places); });
    }
    static Ints with_fifth_bits(Ints nibbles, Ints high, Ints bits) {
        const auto fifth = [](uint8x16_t high, uint8x16_t bits) {
            return vandq_u8(vtstq_u8(high, bits), vdupq_n_u8(16));
        };
        return nibbles | Ints(fifth(high.v.low, bits.v.low), fifth(high.v.high, bits.v.high));
    }

    static Ints add(Ints a, Ints b) {  // 32 bits
        return {vaddq_s32(a.words(0), b.words(0)), vaddq_s32(a.words(1), b.words(1))};
    }
    Vec to_floats() const { return {vcvtq_f32_s32(words(0)), vcvtq_f32_s32(words(1))}; }

private:
    int32x4_t words(int half) const { return vreinterpretq_s32_u8(half ? v.high : v.low); }
    template <typename F>
    Ints each(F change) const {
        return {change(v.low), change(v.high)};
    }
    friend Ints operator|(Ints a, Ints b) {
        return {vorrq_u8(a.v.low, b.v.low), vorrq_u8(a.v.high, b.v.high)};
    }
    static int32x4_t dot(int32x4_t sum, uint8x16_t w, uint8x16_t x) {
        const int8x16_t a = vreinterpretq_s8_u8(w), b = vreinterpretq_s8_u8(x);
#ifdef QUIRE_DOTPROD
        return vdotq_s32(sum, a, b);
#else
        const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
        return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
    }
};

#ifdef QUIRE_I8MM
// Exact sums of two rows for the outputs of an Ints: tiles of 2 rows and 2 outputs, to which one
// instruction (smmla) adds the products of 2 x 8 and 8 x 2 bytes.
struct TwoRowsOfInts {
    using Numbers = int8x16_t;
    int32x4_t tiles[4];

    TwoRowsOfInts() = default;
    TwoRowsOfInts(int32_t first, int32_t second) {
        for (int32x4_t& tile : tiles) tile = int32x4_t{first, first, second, second};
    }

    // Eight numbers of each row
    static Numbers numbers(const int8_t* first, const int8_t* second) {
        return vcombine_s8(vld1_s8(first), vld1_s8(second));
    }
    // Eight numbers of each output, from two lines of four
    struct Columns {
        Numbers of_two[4];
        Columns(Ints line, Ints next) {
            zip(line.v.low, next.v.low, of_two), zip(line.v.high, next.v.high, of_two + 2);
        }

    private:
        static void zip(uint8x16_t line, uint8x16_t next, Numbers* to) {
            const uint32x4_t a = vreinterpretq_u32_u8(line), b = vreinterpretq_u32_u8(next);
            to[0] = vreinterpretq_s8_u32(vzip1q_u32(a, b));
            to[1] = vreinterpretq_s8_u32(vzip2q_u32(a, b));
        }
    };
    void add(Numbers rows, const Columns& columns) {
        for (int i = 0; i < 4; i++) {
            tiles[i] = vmmlaq_s32(tiles[i], rows, columns.of_two[i]);
            asm("" : "+w"(tiles[i]));  // computed here
        }
    }
    Ints row(int i) const { return {half(i, tiles[0], tiles[1]), half(i, tiles[2], tiles[3])}; }

private:
    static int32x4_t half(int i, int32x4_t left, int32x4_t right) {
        const int64x2_t a = vreinterpretq_s64_s32(left), b = vreinterpretq_s64_s32(right);
        return vreinterpretq_s32_s64(i ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
    }
};
#endif

// Forces x to be computed here.
inline Ints settled(Ints x) {
    asm("" : "+w"(x.v.low), "+w"(x.v.high));
    return x;
}

// Integers within +-127, Vec::LANES of them
inline void store_whole(Vec x, int8_t* p) {
    const int16x8_t halves =
        vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.v.low)), vqmovn_s32(vcvtnq_s32_f32(x.v.high)));
    vst1_s8(p, vqmovn_s16(halves));
}
