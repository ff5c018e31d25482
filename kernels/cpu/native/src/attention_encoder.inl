// Attention of text encoders: in both directions, over the keys and values of the step itself
// (abi.h: EncoderAttention).
//
//   item  = some consecutive tokens of one request (a query tile) with all query heads of one KV
//           head, or with one query head where there is a bias
//   row   = a token and one of these heads; the rows of an item are in strips of LANES
//   tile  = TILE keys, beginning at a multiple of TILE
//
// The lanes of a vector are rows: a vector of scores is one key against a strip. So keys need not
// be transposed, a softmax needs no sums across lanes, and short texts fill the vectors. A strip's
// rows and the order of its tiles depend on its request alone, so its bits do too.

constexpr int64_t MAX_ENCODER_HEAD_DIM = 256;
constexpr int TILE = 64;             // keys that stay in the L1 cache while all strips pass
constexpr int SUMS = REGISTERS / 2;  // sums that are held in registers; divides TILE
constexpr int L = Vec::LANES;

// Rows of an item. The keys and values of a long text do not fit the L2 cache: more rows read them
// less often, as long as the rows' sums fit. Fewer rows balance the load.
inline int64_t item_rows(int64_t length, int64_t head_dim) {
    return length < 2048 || head_dim > 128 ? 128 : 512;
}

// Products of single fp32 numbers or, where the processor has them, of pairs of bf16.
template <typename T>
struct LaneDot {
    using type = DotF32;
};
#ifdef QUIRE_BF16
template <>
struct LaneDot<uint16_t> {
    using type = DotBf16;
};
#endif

// sums += x [N, steps] times lanes [steps, LANES]; a step has Dot::X_PER_STEP numbers. x's rows are
// ROW numbers apart, its steps `step`.
template <typename Dot, int64_t ROW, int N>
inline ALWAYS_INLINE void multiply_lanes(const typename Dot::X* x, int64_t step,
                                         const typename Dot::Weight* lanes, int64_t steps,
                                         Vec (&sums)[N]) {
    for (; steps > 0; steps--, x += step, lanes += L * Dot::X_PER_STEP) {
        const auto held = Dot::weights(lanes, 0);
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) sums[i] = settled(Dot::add(sums[i], held, x + i * ROW));
    }
}

// Turns scores [count, LANES] into weights, powers of 2 relative to their lane's maximum, and
// returns their sums. Scores have room for one more key.
inline Vec weigh_lanes(float* scores, int count, Vec most, float* weights) {
    Vec total;
    for (int key = 0; key < count; key++) {
        Vec power = exp2_of_nonpositive(Vec::load(scores + key * L) - most);
        power.store(weights + key * L);
        total = total + power;
    }
    return total;
}
#ifdef QUIRE_BF16
// As pairs of keys, rounded to bf16 and summed as rounded; a last one alone is paired with 0.
inline Vec weigh_lanes(float* scores, int count, Vec most, uint16_t* weights) {
    constexpr uint16_t ONES[] = {0x3f80, 0x3f80};
    Vec total;
    if (count % 2) Vec(-INFINITY).store(scores + count * L);
    for (int key = 0; key < count; key += 2) {
        uint16_t* pair = weights + key * L;
        Vec::store_pairs_flushed(exp2_for_bf16(Vec::load(scores + key * L) - most),
                                 exp2_for_bf16(Vec::load(scores + (key + 1) * L) - most), pair);
        total = DotBf16::add(total, DotBf16::weights(pair, 0), ONES);
    }
    return total;
}
#endif

// The list of items, equal on every thread: by request, then by KV head, then by query tile.
struct EncoderPlan {
    const EncoderAttention& a;
    const Step& step;
    const int64_t num_requests, group, sets;  // query heads of an item; sets of them
    int64_t* first_items = nullptr;           // [num_requests + 1]
    int64_t most_rows = 0;                    // of an item

    EncoderPlan(const EncoderAttention& a, const Step& step)
        : a(a),
          step(step),
          num_requests(a.is_whole ? 1 : step.num_requests),
          group(a.bias ? 1 : a.heads / a.kv_heads),
          sets(a.heads / group) {
        for (int64_t i = 0; i < num_requests; i++)
            most_rows = std::max(most_rows, tokens_per_tile(length_of(i)) * group);
    }
    size_t bytes() const { return round_up((num_requests + 1) * sizeof(int64_t), 64); }
    void make(int64_t* memory) {
        first_items = memory;
        first_items[0] = 0;
        for (int64_t i = 0; i < num_requests; i++) {
            const int64_t length = length_of(i);
            first_items[i + 1] = first_items[i] + ceil_div(length, tokens_per_tile(length)) * sets;
        }
    }

    int64_t start_of(int64_t request) const {
        return a.is_whole ? 0 : step.query_start_loc[request];
    }
    int64_t length_of(int64_t request) const {
        return a.is_whole ? step.num_tokens
                          : step.query_start_loc[request + 1] - step.query_start_loc[request];
    }
    int64_t tokens_per_tile(int64_t length) const {
        return std::max<int64_t>(1, item_rows(length, a.head_dim) / group);
    }
    int64_t num_items() const { return first_items[num_requests]; }
    int64_t request_of(int64_t item) const {
        return std::upper_bound(first_items, first_items + num_requests + 1, item) - first_items -
               1;
    }
};

// One thread's buffers, and the computation of an item.
template <typename T>
struct EncoderAttender {
    using Dot = typename LaneDot<T>::type;
    using X = typename Dot::X;
    static constexpr int PAIR = Dot::X_PER_STEP;
    // of keys: not a power of two, whose lines would share a cache set
    static constexpr int64_t KEY_ROW = MAX_ENCODER_HEAD_DIM + 64 / sizeof(X);
    static constexpr int64_t MOST = 0, TOTAL = L, VALUES = 2 * L;  // places in a strip's state

    const EncoderAttention& a;
    const EncoderPlan& plan;
    const int64_t state_size;
    size_t num_bytes = 0;
    float* states;     // [strips, state_size]: maxima, sums of weights, sums of values [head_dim,
                       // LANES]
    float* positions;  // [strips, LANES]: the rows' tokens
    float* scores;     // [TILE + 1, LANES]
    float* bias;       // by position minus key's position, from -bias_distance - LANES on
    X* weights;        // [TILE / PAIR, LANES, PAIR]
    X* queries;        // [strips, head_dim / PAIR, LANES, PAIR]
    X* keys;           // [TILE, KEY_ROW]
    X* values;         // [TILE / PAIR, head_dim, PAIR]

    // memory: num_bytes, or null for an object that only counts them
    EncoderAttender(const EncoderAttention& a, const EncoderPlan& plan, char* memory)
        : a(a), plan(plan), state_size(VALUES + a.head_dim * L) {
        const int64_t strips = ceil_div(plan.most_rows, L);
        const auto take = [&](auto*& part, int64_t size) {
            if (memory) part = (std::remove_reference_t<decltype(part)>)(memory + num_bytes);
            num_bytes += round_up(size * sizeof(*part), 64);
        };
        take(states, strips * state_size);
        take(positions, strips * L);
        take(scores, (TILE + 1) * L);
        take(bias, bias_size());
        take(weights, TILE * L);
        take(queries, strips * a.head_dim * L);
        take(keys, TILE * KEY_ROW);
        take(values, TILE * a.head_dim);
    }
    int64_t bias_size() const { return a.bias ? 2 * (a.bias_distance + L) : 0; }

    void load_bias(int64_t head) const {
        const int64_t farthest = a.bias_distance;
        const float* from = a.bias + head * (2 * farthest + 1);
        for (int64_t i = 0; i < bias_size(); i++)
            bias[i] = from[std::min(std::max<int64_t>(2 * farthest + L - i, 0), 2 * farthest)] *
                      (float)LOG2_E;
    }

    // Rows `row` to `row + LANES` of num_rows as lanes; others are zeros. first: the item's first
    // row in memory.
    void load_queries(const T* first, int64_t row, int64_t num_rows, X* to) const {
        static const T zeros[MAX_ENCODER_HEAD_DIM] = {};
        const void* rows[L];
        for (int lane = 0; lane < L; lane++, row++)
            rows[lane] = row < num_rows ? first + row / plan.group * a.query_row +
                                              row % plan.group * a.query_head
                                        : zeros;
        for (int lane = 0; lane < L; lane += 8)
            transpose_8(rows + lane, a.head_dim * sizeof(T) / 4, [=](int64_t i, Eight dwords) {
                if constexpr (sizeof(T) < sizeof(X)) {
                    float* at = (float*)to + 2 * i * L + lane;
                    dwords.first_of_pairs().store(at);
                    dwords.second_of_pairs().store(at + L);
                } else {
                    dwords.store((uint32_t*)to + i * L + lane);
                }
            });
    }

    void copy(const T* from, X* to) const {
        if constexpr (sizeof(T) == sizeof(X)) copy_row(from, a.head_dim, to);
        else copy_numbers(from, to, a.head_dim);
    }

    void load_tile(const T* key, const T* value, int count) const {
        for (int i = 0; i < count; i++) copy(key + i * a.key_row, keys + i * KEY_ROW);
        if constexpr (PAIR == 1) {
            for (int i = 0; i < count; i++) copy(value + i * a.value_row, values + i * a.head_dim);
        } else {
            static const T zeros[MAX_ENCODER_HEAD_DIM] = {};
            for (int i = 0; i < count; i += 2) {
                const T *first = value + i * a.value_row,
                        *second = i + 1 < count ? first + a.value_row : zeros;
                for (int64_t d = 0; d < a.head_dim; d += 8)
                    interleave_8(first + d, second + d, values + i * a.head_dim + 2 * d);
            }
        }
    }

    // Scores of a strip against `count` keys from position `start` on, as powers of 2. is_masked:
    // some row does not see one of them. Returns the lanes' maxima, `most` included.
    Vec score(const X* q, const float* strip, int64_t start, int count, bool is_masked,
              Vec most) const {
        const Vec scale((float)(a.scale * LOG2_E)), position = Vec::load(strip),
                                                    reach((float)(2 * a.window));
        for (int key = 0; key < count; key += SUMS) {
            Vec sums[SUMS];
            multiply_lanes<Dot, KEY_ROW>(keys + key * KEY_ROW, PAIR, q, a.head_dim / PAIR, sums);
            const int left = count - key;
#pragma GCC unroll 16
            for (int i = 0; i < SUMS; i++) {
                if (i >= left) break;
                Vec s = sums[i] * scale;
                if (a.bias) s = s + Vec::load(bias_of((int64_t)strip[0] - start - key - i));
                if (is_masked) {  // minus infinity beyond the window, by overflow
                    Vec apart = position - Vec((float)(start + key + i));
                    apart = Vec::max(apart, Vec() - apart);
                    s = Vec::fma(Vec::max(apart + apart - reach, Vec()), Vec(NO_SCORE), s);
                }
                s.store(scores + (key + i) * L);
                most = Vec::max(s, most);  // operand order: a NaN is skipped
            }
        }
        return most;
    }

    const float* bias_of(int64_t distance) const {
        const int64_t farthest = a.bias_distance;
        return bias + farthest + L + std::min(std::max(distance, -farthest - L), farthest);
    }

    void attend_strip(int64_t strip, int64_t start, int count, bool is_first,
                      bool is_masked) const {
        float* state = states + strip * state_size;
        const Vec before = is_first ? Vec(NO_SCORE) : Vec::load(state + MOST);
        const Vec most = score(queries + strip * a.head_dim * L, positions + strip * L, start,
                               count, is_masked, before);
        const Vec decay = exp2_of_nonpositive(before - most);
        const Vec total = weigh_lanes(scores, count, most, weights);
        most.store(state + MOST);
        (is_first ? total : Vec::fma(Vec::load(state + TOTAL), decay, total)).store(state + TOTAL);
        const int64_t steps = ceil_div(count, PAIR);
        int64_t d = 0;
        for (; d + SUMS <= a.head_dim; d += SUMS)
            add_values<SUMS>(state + VALUES, d, steps, is_first, decay);
        for (; d < a.head_dim; d += 8) add_values<8>(state + VALUES, d, steps, is_first, decay);
    }

    // sums of values, from column d on
    template <int N>
    void add_values(float* totals, int64_t d, int64_t steps, bool is_first, Vec decay) const {
        Vec sums[N];
        float* at = totals + d * L;
        if (!is_first) {
#pragma GCC unroll 16
            for (int i = 0; i < N; i++) sums[i] = Vec::load(at + i * L) * decay;
        }
        multiply_lanes<Dot, PAIR>(values + d * PAIR, a.head_dim * PAIR, weights, steps, sums);
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) sums[i].store(at + i * L);
    }

    // Divides a strip's sums and stores its rows. out: the item's first row.
    void store_strip(int64_t strip, int64_t num_rows, T* out) const {
        float *state = states + strip * state_size, *sums = state + VALUES;
        const Vec factor = Vec(1.0f) / Vec::load(state + TOTAL);
        constexpr int WIDTH = 4 / sizeof(T);  // numbers of a dword
        for (int64_t d = 0; d < a.head_dim; d += WIDTH) {
            Vec first = Vec::load(sums + d * L) * factor;
            if constexpr (WIDTH == 1) first.store(sums + d * L);
            else
                Vec::store_pairs(first, Vec::load(sums + (d + 1) * L) * factor,
                                 (T*)(sums + d / 2 * L));
        }
        const int64_t dwords = a.head_dim / WIDTH, first = strip * L;
        for (int64_t d = 0; d < dwords; d += 8) {
            const void* rows[8];
            for (int i = 0; i < 8; i++) rows[i] = sums + (d + i) * L;
            transpose_8(rows, L, [&](int64_t lane, Eight numbers) {
                const int64_t row = first + lane;
                if (row >= num_rows) return;
                T* to =
                    out + (row / plan.group * a.heads + row % plan.group) * a.head_dim + d * WIDTH;
                if (d + 8 <= dwords) numbers.store(to);
                else numbers.store_four(to);
            });
        }
    }

    void attend_item(int64_t item) const {
        const int64_t request = plan.request_of(item), index = item - plan.first_items[request],
                      first = plan.start_of(request), length = plan.length_of(request),
                      per_tile = plan.tokens_per_tile(length), tiles = ceil_div(length, per_tile),
                      token = index % tiles * per_tile,
                      num_tokens = std::min(per_tile, length - token),
                      num_rows = num_tokens * plan.group, strips = ceil_div(num_rows, L),
                      head = index / tiles * plan.group, kv_head = head / (a.heads / a.kv_heads);
        const T *query = (const T*)a.query + (first + token) * a.query_row + head * a.query_head,
                *key = (const T*)a.key + first * a.key_row + kv_head * a.key_head,
                *value = (const T*)a.value + first * a.value_row + kv_head * a.value_head;
        if (a.bias) load_bias(head);
        for (int64_t strip = 0; strip < strips; strip++)
            load_queries(query, strip * L, num_rows, queries + strip * a.head_dim * L);
        for (int64_t row = 0; row < strips * L; row++)
            positions[row] = (float)(token + row / plan.group);
        const auto first_tile_of = [&](int64_t position) {
            return a.window ? std::max<int64_t>(position - a.window, 0) / TILE * TILE : 0;
        };
        const int64_t last = token + num_tokens - 1,
                      end = a.window ? std::min(last + a.window + 1, length) : length;
        for (int64_t start = first_tile_of(token); start < end; start += TILE) {
            const int count = (int)std::min<int64_t>(TILE, length - start);
            load_tile(key + start * a.key_row, value + start * a.value_row, count);
            for (int64_t strip = 0; strip < strips; strip++) {
                const int64_t lowest = token + strip * L / plan.group,
                              highest = std::min(token + (strip * L + L - 1) / plan.group, last);
                if (a.window && (start > highest + a.window || start < first_tile_of(lowest)))
                    continue;
                const bool is_masked = a.window && (start < highest - a.window ||
                                                    start + count - 1 > lowest + a.window);
                attend_strip(strip, start, count, start == first_tile_of(lowest), is_masked);
            }
        }
        T* out = (T*)a.out + ((first + token) * a.heads + head) * a.head_dim;
        for (int64_t strip = 0; strip < strips; strip++) store_strip(strip, num_rows, out);
    }
};

template <typename T>
void attend_both_ways(const EncoderAttention& a, const Step& step, const Worker& worker) {
    EncoderPlan plan(a, step);
    const size_t plan_bytes = plan.bytes(),
                 all_bytes = plan_bytes + EncoderAttender<T>(a, plan, nullptr).num_bytes;
    char* memory = (char*)worker.scratch(all_bytes);
    plan.make((int64_t*)memory);
    const EncoderAttender<T> attender(a, plan, memory + plan_bytes);
    for (int64_t item; (item = worker.next(plan.num_items())) < plan.num_items();)
        attender.attend_item(item);
}

void encoder_attention(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, attend_both_ways<T>((const EncoderAttention&)call, step, worker));
}
