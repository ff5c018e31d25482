// Eight 32-bit words, and steps on a few numbers of fixed count. The names are those of
// eight_x86.h.
#pragma once
#include <arm_neon.h>

struct Eight {
    uint32x4_t low, high;

    static Eight load(const void* p) {
        return {vld1q_u32((const uint32_t*)p), vld1q_u32((const uint32_t*)p + 4)};
    }
    void store(void* p) const { vst1q_u32((uint32_t*)p, low), vst1q_u32((uint32_t*)p + 4, high); }
    void store_four(void* p) const { vst1q_u32((uint32_t*)p, low); }

    // Words `at` to at + 3 of eight rows: columns[i] has word at + i of each.
    static void transpose(const void* const* rows, int64_t at, Eight (&columns)[4]) {
        uint32x4_t four[2][4];
        for (int i = 0; i < 2; i++) {
            uint32x4_t x[4];
            for (int j = 0; j < 4; j++) x[j] = vld1q_u32((const uint32_t*)rows[4 * i + j] + at);
            transpose_words(x, four[i]);
        }
        for (int j = 0; j < 4; j++) columns[j] = {four[0][j], four[1][j]};
    }
    static void transpose_words(const uint32x4_t (&x)[4], uint32x4_t (&columns)[4]) {
        const auto pair = [](uint32x4_t a, uint32x4_t b, bool upper) {
            const uint64x2_t x = vreinterpretq_u64_u32(a), y = vreinterpretq_u64_u32(b);
            return vreinterpretq_u32_u64(upper ? vtrn2q_u64(x, y) : vtrn1q_u64(x, y));
        };
        const uint32x4_t a = vtrn1q_u32(x[0], x[1]), b = vtrn2q_u32(x[0], x[1]),
                         c = vtrn1q_u32(x[2], x[3]), d = vtrn2q_u32(x[2], x[3]);
        columns[0] = pair(a, c, false), columns[1] = pair(b, d, false);
        columns[2] = pair(a, c, true), columns[3] = pair(b, d, true);
    }

    // Of pairs of bf16: the first of each, or the second, in fp32; and the inverse.
    Eight first_of_pairs() const { return {vshlq_n_u32(low, 16), vshlq_n_u32(high, 16)}; }
    Eight second_of_pairs() const {
        const uint32x4_t upper = vdupq_n_u32(0xffff0000);
        return {vandq_u32(low, upper), vandq_u32(high, upper)};
    }
    static Eight pairs(Eight first, Eight second) {  // exactly bf16
        return {vsriq_n_u32(second.low, first.low, 16), vsriq_n_u32(second.high, first.high, 16)};
    }
    // Byte I of each word, signed, in fp32
    template <int I>
    Eight float_of_byte() const {
        const auto half = [](uint32x4_t x) {
            const int32x4_t upper = vreinterpretq_s32_u32(vshlq_n_u32(x, 24 - 8 * I));
            return vreinterpretq_u32_f32(vcvtq_f32_s32(vshrq_n_s32(upper, 24)));
        };
        return {half(low), half(high)};
    }
};

// Eight integers in fp32; sixteen in bf16
inline void floats_of_8(const int8_t* from, float32x4_t (&out)[2]) {
    const int16x8_t x = vmovl_s8(vld1_s8(from));
    out[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(x)));
    out[1] = vcvtq_f32_s32(vmovl_high_s16(x));
}
inline void widen_8(const int8_t* from, float* out) {
    float32x4_t x[2];
    floats_of_8(from, x);
    vst1q_f32(out, x[0]), vst1q_f32(out + 4, x[1]);
}
inline void widen_16(const int8_t* from, uint16_t* out) {
    for (int i = 0; i < 16; i += 8) {
        float32x4_t x[2];
        floats_of_8(from + i, x);
        vst1q_u16(out + i, vuzp2q_u16(vreinterpretq_u16_f32(x[0]), vreinterpretq_u16_f32(x[1])));
    }
}

// Eight pairs of numbers of two rows
inline void interleave_8(const uint16_t* first, const uint16_t* second, uint16_t* out) {
    const uint16x8_t x = vld1q_u16(first), y = vld1q_u16(second);
    vst1q_u16(out, vzip1q_u16(x, y)), vst1q_u16(out + 8, vzip2q_u16(x, y));
}

// Rows of four fp32 numbers become columns.
inline void transpose_4(const float* from, int64_t from_row, float* to, int64_t to_row) {
    uint32x4_t x[4], columns[4];
    for (int row = 0; row < 4; row++)
        x[row] = vreinterpretq_u32_f32(vld1q_f32(from + row * from_row));
    Eight::transpose_words(x, columns);
    for (int column = 0; column < 4; column++)
        vst1q_f32(to + column * to_row, vreinterpretq_f32_u32(columns[column]));
}

// a, b = a + b, a - b, eight of each
inline void add_and_subtract_8(float* a, float* b) {
    const Vec x = Vec::load(a), y = Vec::load(b);
    (x + y).store(a), (x - y).store(b);
}
// The same for strides of 4, 2 and 1 within eight numbers: they change places, and the later ones
// their sign.
inline void hadamard_8(float* at) {
    const uint32_t sign = 0x80000000;
    const uint32x4_t two = {0, 0, sign, sign}, one = {0, sign, 0, sign};
    const auto negated = [](float32x4_t x, uint32x4_t signs) {
        return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(x), signs));
    };
    const float32x4_t low = vld1q_f32(at), high = vld1q_f32(at + 4);
    float32x4_t x[] = {vaddq_f32(high, low), vsubq_f32(low, high)};
    for (int i = 0; i < 2; i++) {
        x[i] = vaddq_f32(vextq_f32(x[i], x[i], 2), negated(x[i], two));
        x[i] = vaddq_f32(vrev64q_f32(x[i]), negated(x[i], one));
        vst1q_f32(at + 4 * i, x[i]);
    }
}

inline float float_of_half(uint16_t bits) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(bits))), 0);
}

// The largest of the lower 15 bits of numbers [size], a multiple of 16
inline uint16_t largest_of_15_bits(const uint16_t* numbers, int64_t size) {
    uint16x8_t most = vdupq_n_u16(0);
    for (int64_t i = 0; i < size; i += 8)
        most = vmaxq_u16(most, vbicq_u16(vld1q_u16(numbers + i), vdupq_n_u16(0x8000)));
    return vmaxvq_u16(most);
}

// The sums of 32 numbers: by eight, and of all
inline void sums_of_8(const int8_t* numbers, int32_t* sums) {
    for (int64_t i = 0; i < 4; i++) sums[i] = vaddlv_s8(vld1_s8(numbers + 8 * i));
}
inline int32_t sum_of_32(const int8_t* numbers) {
    return vaddlvq_s8(vld1q_s8(numbers)) + vaddlvq_s8(vld1q_s8(numbers + 16));
}
