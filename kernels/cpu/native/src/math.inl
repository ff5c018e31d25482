// Small functions that kernels share. Included by kernels.inl in the namespace of each instruction
// set, after its Vec.

#define ALWAYS_INLINE __attribute__((always_inline))

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
inline int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

template <typename T>
struct Number;  // the storage types: uint16_t holds bf16
template <>
struct Number<float> {
    static float get(float x) { return x; }
    static float round(float x) { return x; }
    static Vec round(Vec x) { return x; }
};
template <>
struct Number<uint16_t> {
    static float get(uint16_t x) {
        uint32_t bits = (uint32_t)x << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    static uint16_t put(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if (x != x) return (uint16_t)((bits >> 16) | 0x40);
        return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    static float round(float x) { return get(put(x)); }
    static Vec round(Vec x) { return x.rounded(); }
};

inline void put(float* p, float x) { *p = x; }
inline void put(uint16_t* p, float x) { *p = Number<uint16_t>::put(x); }

// The first numbers of a row of which `count` are left, with zeros behind them; and its inverse.
template <typename T>
inline Vec load_some(const T* p, int64_t count) {
    if (count >= Vec::LANES) return Vec::load(p);
    T numbers[Vec::LANES] = {};
    std::copy_n(p, count, numbers);
    return Vec::load(numbers);
}
template <typename T>
inline void store_some(Vec x, T* p, int64_t count) {
    if (count >= Vec::LANES) return x.store(p);
    T numbers[Vec::LANES];
    x.store(numbers);
    std::copy_n(numbers, count, p);
}

// Calls one of a kernel's two forms.
#define FOR_DTYPE(dtype, call)  \
    do {                        \
        if ((dtype) == BF16) {  \
            using T = uint16_t; \
            call;               \
        } else {                \
            using T = float;    \
            call;               \
        }                       \
    } while (0)

// The same in a kernel that multiplies bf16 with this instruction set's own instructions: numbers
// in fp32 are its base's.
#ifdef QUIRE_BF16
#define FOR_OWN_DTYPE(call, step, worker, own)                      \
    do {                                                            \
        if ((call).dtype == BF16) {                                 \
            using T = uint16_t;                                     \
            own;                                                    \
        } else {                                                    \
            QUIRE_BASE.kernel((call).op)((call), (step), (worker)); \
        }                                                           \
    } while (0)
#else
#define FOR_OWN_DTYPE(call, step, worker, own) FOR_DTYPE((call).dtype, own)
#endif

// e**x to about 1 unit in the last place: 2**n times a polynomial in the remainder (coefficients of
// Cephes' expf). 0 below -87.3.
inline Vec exp(Vec x) {
    Vec inside = Vec::max(Vec::min(x, Vec(88.3f)), Vec(-87.3f));
    Vec n = Vec::round(inside * Vec(1.44269504f));
    Vec r = Vec::fma(n, Vec(-0.693359375f), inside);
    r = Vec::fma(n, Vec(2.12194440e-4f), r);
    Vec p(1.9875691500e-4f);
    p = Vec::fma(p, r, Vec(1.3981999507e-3f));
    p = Vec::fma(p, r, Vec(8.3334519073e-3f));
    p = Vec::fma(p, r, Vec(4.1665795894e-2f));
    p = Vec::fma(p, r, Vec(1.6666665459e-1f));
    p = Vec::fma(p, r, Vec(5.0000001201e-1f));
    p = Vec::fma(p, r * r, r + Vec(1.0f));
    return Vec::keep_where_at_least(Vec::scale_by_power(p, n), x, -87.3f);
}

// tanh to about 2 units in the last place; NaN for NaN. Lambert's continued fraction at x / 2,
// where it is exact enough, then the double-angle formula.
inline Vec tanh(Vec x) {
    // operand order: the second one if one is NaN
    Vec half = Vec::max(Vec(-4.7f), Vec::min(Vec(4.7f), x * Vec(0.5f)));
    Vec square = half * half;
    Vec above = Vec::fma(square + Vec(378.0f), square, Vec(17325.0f));
    Vec below = Vec::fma(Vec::fma(Vec(28.0f), square, Vec(3150.0f)), square, Vec(62370.0f));
    Vec t =
        half * Vec::fma(above, square, Vec(135135.0f)) / Vec::fma(below, square, Vec(135135.0f));
    return (t + t) / Vec::fma(t, t, Vec(1.0f));
}

inline Vec silu(Vec x) { return x / (Vec(1.0f) + exp(Vec() - x)); }

// (up + 1) * gate * sigmoid(scale * gate) of clamped numbers; a NaN stays one
inline Vec clamped_swiglu(Vec gate, Vec up, Vec scale, Vec limit) {
    gate = Vec::min(limit, gate);
    up = Vec::max(Vec() - limit, Vec::min(limit, up));
    return gate / (Vec(1.0f) + exp(Vec() - gate * scale)) * (up + Vec(1.0f));
}

// GELU as its approximation by tanh defines it (Hendrycks & Gimpel 2016): (1 + tanh(u)) / 2 is
// 1 / (1 + e**(-2 u)), which stays exact where tanh is near -1.
inline Vec gelu_tanh(Vec x) {
    Vec u = Vec::fma(x * x * Vec(0.044715f), x, x);  // times the root of 2 / pi
    return x / (Vec(1.0f) + exp(u * Vec(-1.5957691216f)));
}

inline Vec relu(Vec x) { return Vec::max(Vec(), x); }  // the second one if one is NaN

inline Vec relu_squared(Vec x) { return relu(x) * relu(x); }

inline Vec sigmoid(Vec x) { return Vec(1.0f) / (Vec(1.0f) + exp(Vec() - x)); }

// log(1 + e**x) to about 2 units in the last place; NaN for NaN. With y = e**-|x|, log(1 + y) is
// twice the inverse hyperbolic tangent of y / (2 + y), at most 1/3, by its power series.
inline Vec softplus(Vec x) {
    Vec y = exp(Vec::min(Vec() - x, x));  // operand order: the second one if one is NaN
    Vec z = y / (y + Vec(2.0f)), square = z * z;
    Vec p(1.0f / 15);
    p = Vec::fma(p, square, Vec(1.0f / 13));
    p = Vec::fma(p, square, Vec(1.0f / 11));
    p = Vec::fma(p, square, Vec(1.0f / 9));
    p = Vec::fma(p, square, Vec(1.0f / 7));
    p = Vec::fma(p, square, Vec(1.0f / 5));
    p = Vec::fma(p, square, Vec(1.0f / 3));
    p = Vec::fma(p, square, Vec(1.0f));
    return relu(x) + (z + z) * p;
}

// 2**x for x <= 0 to about 1 unit in the last place; exactly 1 at 0, exactly 0 below -126, NaN for
// NaN. The coefficients are a fit of least relative error over [-0.5, 0.5].
inline Vec exp2_of_nonpositive(Vec x) {
    Vec inside = Vec::max(Vec(-126.0f), x);  // operand order: the second one if one is NaN
    Vec n = Vec::round(inside);
    Vec r = inside - n;
    Vec p(1.53533620e-4f);
    p = Vec::fma(p, r, Vec(1.33988750e-3f));
    p = Vec::fma(p, r, Vec(9.61843692e-3f));
    p = Vec::fma(p, r, Vec(5.55033237e-2f));
    p = Vec::fma(p, r, Vec(2.40226477e-1f));
    p = Vec::fma(p, r, Vec(6.93147182e-1f));
    p = Vec::fma(p, r, Vec(1.0f));
    return Vec::clear_where_less(Vec::scale_by_power(p, n), x, -126.0f);
}

// GELU as the normal distribution defines it (Hendrycks & Gimpel 2016), to about 2 units in the
// last place of x: max(x, 0) - |x| times the probability beyond |x|. That is e**(-x * x / 2) times
// a polynomial in t = 1 / (1 + 0.21 |x|), a fit of least relative error (1.3e-8) up to 13.3.
inline Vec gelu(Vec x) {
    Vec size = Vec::min(Vec(14.0f), Vec::max(x, Vec() - x));  // operand order: NaN stays
    Vec t = Vec(1.0f) / Vec::fma(Vec(0.21f), size, Vec(1.0f));
    Vec p(-7.218951332e-2f);
    p = Vec::fma(p, t, Vec(2.862217961e-1f));
    p = Vec::fma(p, t, Vec(-3.358134868e-1f));
    p = Vec::fma(p, t, Vec(3.559483613e-1f));
    p = Vec::fma(p, t, Vec(-9.862178392e-2f));
    p = Vec::fma(p, t, Vec(1.269716722e-1f));
    p = Vec::fma(p, t, Vec(6.862204497e-2f));
    p = Vec::fma(p, t, Vec(8.515484320e-2f));
    p = Vec::fma(p, t, Vec(8.370606543e-2f));
    Vec beyond = exp2_of_nonpositive(size * size * Vec(-0.7213475204f)) * t * p;
    return relu(x) - size * beyond;
}
