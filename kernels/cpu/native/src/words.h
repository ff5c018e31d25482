// Four 32-bit words in a register, for packing weights.
#pragma once

#if defined(__x86_64__)
#include <emmintrin.h>
using Four = __m128i;
inline Four load_four(const void* p) { return _mm_loadu_si128((const Four*)p); }
inline void store_four(void* p, Four x) { _mm_store_si128((Four*)p, x); }  // p: divisible by 16
// The same past the caches, where the processor can; what makes such stores visible to others
inline void stream_four(void* p, Four x) { _mm_stream_si128((Four*)p, x); }
inline void end_streams() { _mm_sfence(); }
inline void transpose_fours(Four (&x)[4]) {
    Four ab_low = _mm_unpacklo_epi32(x[0], x[1]), ab_high = _mm_unpackhi_epi32(x[0], x[1]);
    Four cd_low = _mm_unpacklo_epi32(x[2], x[3]), cd_high = _mm_unpackhi_epi32(x[2], x[3]);
    x[0] = _mm_unpacklo_epi64(ab_low, cd_low), x[1] = _mm_unpackhi_epi64(ab_low, cd_low);
    x[2] = _mm_unpacklo_epi64(ab_high, cd_high), x[3] = _mm_unpackhi_epi64(ab_high, cd_high);
}
#elif defined(__aarch64__)
#include <arm_neon.h>
using Four = uint32x4_t;
inline Four load_four(const void* p) {
    return vreinterpretq_u32_u8(vld1q_u8((const unsigned char*)p));
}
inline void store_four(void* p, Four x) { vst1q_u8((unsigned char*)p, vreinterpretq_u8_u32(x)); }
inline void stream_four(void* p, Four x) { store_four(p, x); }
inline void end_streams() {}
inline void transpose_fours(Four (&x)[4]) {
    uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(x[0], x[1])),
               b = vreinterpretq_u64_u32(vtrn2q_u32(x[0], x[1])),
               c = vreinterpretq_u64_u32(vtrn1q_u32(x[2], x[3])),
               d = vreinterpretq_u64_u32(vtrn2q_u32(x[2], x[3]));
    x[0] = vreinterpretq_u32_u64(vtrn1q_u64(a, c)), x[1] = vreinterpretq_u32_u64(vtrn1q_u64(b, d));
    x[2] = vreinterpretq_u32_u64(vtrn2q_u64(a, c)), x[3] = vreinterpretq_u32_u64(vtrn2q_u64(b, d));
}
#endif
