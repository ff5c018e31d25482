// Vectors of 8 fp32 numbers in two NEON registers, so that sums have the orders of AVX2. The names
// are those of vec_avx2.h.
#pragma once
#include <arm_neon.h>

struct TwoFloats {
    float32x4_t low, high;
};

struct Vec {
    static constexpr int LANES = 8;
    TwoFloats v;
    Vec() : v{vdupq_n_f32(0), vdupq_n_f32(0)} {}
    Vec(TwoFloats x) : v(x) {}
    Vec(float32x4_t low, float32x4_t high) : v{low, high} {}
    Vec(uint32x4_t low, uint32x4_t high)
        : v{vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high)} {}
    explicit Vec(float x) : v{vdupq_n_f32(x), vdupq_n_f32(x)} {}

    static Vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    void store(float* p) const { vst1q_f32(p, v.low), vst1q_f32(p + 4, v.high); }

    static Vec load(const uint16_t* p) {  // bf16: the upper half of an fp32 number
        const uint16x8_t zero = vdupq_n_u16(0), x = vld1q_u16(p);
        return {vreinterpretq_u32_u16(vzip1q_u16(zero, x)),
                vreinterpretq_u32_u16(vzip2q_u16(zero, x))};
    }
    static Vec load_halves(const void* p) {  // fp16
        const float16x8_t x = vreinterpretq_f16_u16(vld1q_u16((const uint16_t*)p));
        return {vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)};
    }
#ifdef QUIRE_BF16
    void store(uint16_t* p) const { vst1q_u16(p, vreinterpretq_u16_bf16(in_bf16())); }
    // first, then second, rounded as `store` does; x86 turns denormal numbers into zeros here
    static void store_flushed(Vec first, Vec second, uint16_t* p) {
        first.store(p), second.store(p + LANES);
    }
    // The same in pairs, as store_pairs.
    static void store_pairs_flushed(Vec first, Vec second, uint16_t* p) {
        const uint16x8_t x = vreinterpretq_u16_bf16(first.in_bf16()),
                         y = vreinterpretq_u16_bf16(second.in_bf16());
        vst1q_u16(p, vzip1q_u16(x, y)), vst1q_u16(p + 8, vzip2q_u16(x, y));
    }
    bfloat16x8_t in_bf16() const { return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.low), v.high); }
    // x - floor(x), 0 where x is infinite
    Vec fraction() const {
        const auto half = [](float32x4_t x) {
            x = vmaxq_f32(x, vdupq_n_f32(-3.4028235e38f));  // NaN stays
            return vsubq_f32(x, vrndmq_f32(x));
        };
        return {half(v.low), half(v.high)};
    }
    // a * 2**floor(n) for n below 128; 0 where n is below -126
    static Vec scale_by_floor(Vec a, Vec n) {
        const auto half = [](float32x4_t a, float32x4_t n) {
            const int32x4_t exponent = vmaxq_s32(vcvtmq_s32_f32(n), vdupq_n_s32(-127));
            return vmulq_f32(
                a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(exponent, vdupq_n_s32(127)), 23)));
        };
        return {half(a.v.low, n.v.low), half(a.v.high, n.v.high)};
    }
#else
    void store(uint16_t* p) const {
        vst1q_u16(p, vuzp2q_u16(vreinterpretq_u16_u32(rounded_bits(v.low)),
                                vreinterpretq_u16_u32(rounded_bits(v.high))));
    }
#endif
    // Conversion to bf16 and back: nearest, ties to even; NaN stays NaN.
    Vec rounded() const {
        const uint32x4_t upper = vdupq_n_u32(0xffff0000);
        return {vandq_u32(rounded_bits(v.low), upper), vandq_u32(rounded_bits(v.high), upper)};
    }

    // LANES pairs of bf16: the first number of each pair, the second of each pair; and the inverse.
    static Vec first_of_pairs(const uint16_t* p) {
        return {vshlq_n_u32(words(p), 16), vshlq_n_u32(words(p + 8), 16)};
    }
    static Vec second_of_pairs(const uint16_t* p) {
        const uint32x4_t upper = vdupq_n_u32(0xffff0000);
        return {vandq_u32(words(p), upper), vandq_u32(words(p + 8), upper)};
    }
    static void store_pairs(Vec first, Vec second, uint16_t* p) {
        vst1q_u16(p, pairs(first.v.low, second.v.low));
        vst1q_u16(p + 8, pairs(first.v.high, second.v.high));
    }

    // The second one if one is NaN or both are zeros, as on x86
    static Vec max(Vec a, Vec b) {
        return {vbslq_f32(vcgtq_f32(a.v.low, b.v.low), a.v.low, b.v.low),
                vbslq_f32(vcgtq_f32(a.v.high, b.v.high), a.v.high, b.v.high)};
    }
    static Vec min(Vec a, Vec b) {
        return {vbslq_f32(vcltq_f32(a.v.low, b.v.low), a.v.low, b.v.low),
                vbslq_f32(vcltq_f32(a.v.high, b.v.high), a.v.high, b.v.high)};
    }
    static Vec fma(Vec a, Vec b, Vec c) {  // a * b + c
        return {vfmaq_f32(c.v.low, a.v.low, b.v.low), vfmaq_f32(c.v.high, a.v.high, b.v.high)};
    }
    static Vec round(Vec a) { return {vrndnq_f32(a.v.low), vrndnq_f32(a.v.high)}; }
    // a * 2**n for integers n in [-126, 127]
    static Vec scale_by_power(Vec a, Vec n) {
        return {scaled(a.v.low, n.v.low), scaled(a.v.high, n.v.high)};
    }
    // value where x >= least, 0 where it is less, NaN where x is NaN
    static Vec keep_where_at_least(Vec value, Vec x, float least) {
        const float32x4_t from = vdupq_n_f32(least);
        const auto half = [&](float32x4_t value, float32x4_t x) {
            const uint32x4_t kept = vandq_u32(vreinterpretq_u32_f32(value), vcgeq_f32(x, from));
            return vbslq_f32(vceqq_f32(x, x), vreinterpretq_f32_u32(kept), x);
        };
        return {half(value.v.low, x.v.low), half(value.v.high, x.v.high)};
    }
    // value where x >= least or x is NaN, 0 where it is less
    static Vec clear_where_less(Vec value, Vec x, float least) {
        const float32x4_t from = vdupq_n_f32(least);
        return {vbicq_u32(vreinterpretq_u32_f32(value.v.low), vcltq_f32(x.v.low, from)),
                vbicq_u32(vreinterpretq_u32_f32(value.v.high), vcltq_f32(x.v.high, from))};
    }

    // The sums of four vectors' lanes.
    static void sum4(const Vec* x, float* out) {
        const float32x4_t low = vpaddq_f32(vpaddq_f32(x[0].v.low, x[1].v.low),
                                           vpaddq_f32(x[2].v.low, x[3].v.low)),
                          high = vpaddq_f32(vpaddq_f32(x[0].v.high, x[1].v.high),
                                            vpaddq_f32(x[2].v.high, x[3].v.high));
        vst1q_f32(out, vaddq_f32(low, high));
    }
    bool has_nan() const {
        return vminvq_u32(vandq_u32(vceqq_f32(v.low, v.low), vceqq_f32(v.high, v.high))) == 0;
    }
    float sum() const {
        const float32x4_t x = vaddq_f32(v.low, v.high);
        const float32x2_t y = vadd_f32(vget_low_f32(x), vget_high_f32(x));
        return vget_lane_f32(y, 0) + vget_lane_f32(y, 1);
    }
    float largest() const {
        const auto larger = [](float a, float b) { return a > b ? a : b; };
        const float32x4_t x = vbslq_f32(vcgtq_f32(v.low, v.high), v.low, v.high);
        return larger(larger(vgetq_lane_f32(x, 0), vgetq_lane_f32(x, 2)),
                      larger(vgetq_lane_f32(x, 1), vgetq_lane_f32(x, 3)));
    }

private:
    static uint32x4_t words(const uint16_t* p) { return vreinterpretq_u32_u16(vld1q_u16(p)); }
    static uint16x8_t pairs(float32x4_t first, float32x4_t second) {
        return vtrn2q_u16(vreinterpretq_u16_u32(rounded_bits(first)),
                          vreinterpretq_u16_u32(rounded_bits(second)));
    }
    static float32x4_t scaled(float32x4_t a, float32x4_t n) {
        const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23);
        return vmulq_f32(a, vreinterpretq_f32_s32(exponent));
    }
    static uint32x4_t rounded_bits(
        float32x4_t x) {  // the upper 16 bits of each lane are the number
        const uint32x4_t bits = vreinterpretq_u32_f32(x);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
        return vbslq_u32(vceqq_f32(x, x), up, quiet);
    }
};

inline Vec operator+(Vec a, Vec b) {
    return {vaddq_f32(a.v.low, b.v.low), vaddq_f32(a.v.high, b.v.high)};
}
inline Vec operator-(Vec a, Vec b) {
    return {vsubq_f32(a.v.low, b.v.low), vsubq_f32(a.v.high, b.v.high)};
}
inline Vec operator*(Vec a, Vec b) {
    return {vmulq_f32(a.v.low, b.v.low), vmulq_f32(a.v.high, b.v.high)};
}
inline Vec operator/(Vec a, Vec b) {
    return {vdivq_f32(a.v.low, b.v.low), vdivq_f32(a.v.high, b.v.high)};
}

// Forces x to be computed here.
inline Vec settled(Vec x) {
    asm("" : "+w"(x.v.low), "+w"(x.v.high));
    return x;
}

// 32-bit words in 64-bit lanes, which leaves room for products: only the lower half of a lane is
// significant.
struct Words {
    static constexpr int LANES = 4;
    uint64x2_t low, high_lanes;
    Words(uint64x2_t low, uint64x2_t high) : low(low), high_lanes(high) {}
    explicit Words(uint32_t x) : low(vdupq_n_u64(x)), high_lanes(vdupq_n_u64(x)) {}

    static Words iota(uint32_t first) {
        const uint64x2_t begin = {first, (uint64_t)first + 1};
        return {begin, vaddq_u64(begin, vdupq_n_u64(2))};
    }
    static Words product(Words a, Words b) {  // all 64 bits
        return {vmull_u32(vmovn_u64(a.low), vmovn_u64(b.low)),
                vmull_u32(vmovn_u64(a.high_lanes), vmovn_u64(b.high_lanes))};
    }
    Words high() const { return {vshrq_n_u64(low, 32), vshrq_n_u64(high_lanes, 32)}; }
    // Pairs of words, low and high, in sequence.
    static void store_pairs(Words low, Words high, uint64_t* p) {
        vst1q_u64(p, vsliq_n_u64(low.low, high.low, 32));
        vst1q_u64(p + 2, vsliq_n_u64(low.high_lanes, high.high_lanes, 32));
    }
};
inline Words operator^(Words a, Words b) {
    return {veorq_u64(a.low, b.low), veorq_u64(a.high_lanes, b.high_lanes)};
}

struct DotF32 {
    using Weight = float;
    using X = float;
    static constexpr int STEPS = 1, X_PER_STEP = 1;
    static Vec weights(const float* p, int) { return Vec::load(p); }
    static Vec add(Vec sum, Vec weights, const float* x) { return Vec::fma(Vec(*x), weights, sum); }
};
#ifdef QUIRE_BF16
struct DotBf16 {
    using Weight = uint16_t;
    using X = uint16_t;
    struct Pairs {
        bfloat16x8_t low, high;
    };
    static constexpr int STEPS = 1, X_PER_STEP = 2;  // a pair of k per instruction
    static Pairs weights(const uint16_t* p, int) {
        return {vreinterpretq_bf16_u16(vld1q_u16(p)), vreinterpretq_bf16_u16(vld1q_u16(p + 8))};
    }
    static Vec add(Vec sum, Pairs weights, const uint16_t* x) {
        uint32_t pair;
        __builtin_memcpy(&pair, x, 4);
        uint32x4_t words = vdupq_n_u32(pair);
        // GCC 12 makes constants with an instruction for fp16, which the processor may not have
        if (__builtin_constant_p(pair)) asm("" : "+w"(words));
        const bfloat16x8_t pairs = vreinterpretq_bf16_u32(words);
        return add(sum, {pairs, pairs}, weights);
    }
    static Vec add(Vec sum, Pairs a, Pairs b) {
        return {vbfdotq_f32(sum.v.low, a.low, b.low), vbfdotq_f32(sum.v.high, a.high, b.high)};
    }
};

// Two rows times four columns of four k: sums of 2 x 2
struct PairsOfRows {
    using Numbers = bfloat16x8_t;
    float32x4_t sum[2] = {vdupq_n_f32(0), vdupq_n_f32(0)};

    // Four numbers of each row
    static Numbers numbers(const uint16_t* first, const uint16_t* second) {
        return vreinterpretq_bf16_u16(vcombine_u16(vld1_u16(first), vld1_u16(second)));
    }
    // Four columns of two lines of pairs
    struct Columns {
        Numbers of_two[2];
        Columns(const uint16_t* line, const uint16_t* next) {
            const uint32x4_t a = vreinterpretq_u32_u16(vld1q_u16(line)),
                             b = vreinterpretq_u32_u16(vld1q_u16(next));
            of_two[0] = vreinterpretq_bf16_u32(vzip1q_u32(a, b));
            of_two[1] = vreinterpretq_bf16_u32(vzip2q_u32(a, b));
        }
    };
    void add(Numbers rows, const Columns& columns) {
        for (int i = 0; i < 2; i++) sum[i] = vbfmmlaq_f32(sum[i], rows, columns.of_two[i]);
    }
    // second: null if there is no such row. Sums are added to, unless they are the first.
    void store(float* first, float* second, bool is_first) const {
        const float64x2_t a = vreinterpretq_f64_f32(sum[0]), b = vreinterpretq_f64_f32(sum[1]);
        store_row(vreinterpretq_f32_f64(vzip1q_f64(a, b)), first, is_first);
        if (second) store_row(vreinterpretq_f32_f64(vzip2q_f64(a, b)), second, is_first);
    }

private:
    static void store_row(float32x4_t row, float* to, bool is_first) {
        vst1q_f32(to, is_first ? row : vaddq_f32(vld1q_f32(to), row));
    }
};
#else
struct DotBf16 {
    using Weight = uint16_t;
    using X = float;
    static constexpr int STEPS = 2, X_PER_STEP = 1;
    static Vec weights(const uint16_t* p, int step) {
        return step == 0 ? Vec::first_of_pairs(p) : Vec::second_of_pairs(p);
    }
    static Vec add(Vec sum, Vec weights, const float* x) { return Vec::fma(Vec(*x), weights, sum); }
};
#endif
// of two of the 32
constexpr int REGISTERS = 16, MAX_SUMS = 10;
