// Layers that keep a state (kernels/states.py). One thread computes a part of a state for all
// tokens of a request, one token after another, in an order of sums that depends on the sizes
// alone: bits depend neither on how a prompt is cut nor on threads.

// ------------------------------------------------------------ states of requests

// A request's tokens [begin, end) of the step, and the tokens after which its state is written.
struct StateRow {
    static constexpr int64_t NONE = -1;
    int64_t begin, end, place, copy_place;
    bool is_fresh;  // begins with zeros
    int64_t last, copy;

    StateRow(const Step& step, int64_t row)
        : begin(step.query_start_loc[row]),
          end(step.query_start_loc[row + 1]),
          place(step.state_places[row]),
          copy_place(step.copy_places[row]) {
        const int64_t count = end - begin, first = step.seq_lens[row] - count,
                      last_offset = std::min(step.last_positions[row] - first, count - 1),
                      copy_offset = step.copy_positions[row] - first;
        is_fresh = place < 0 || first == 0;
        last = place >= 0 && last_offset >= 0 ? begin + last_offset : NONE;
        copy = place >= 0 && copy_offset >= 0 && copy_offset < count ? begin + copy_offset : NONE;
    }
};

// Part of a state: `rows` rows of `columns` numbers, `stride` apart, at `data` in the first place.
struct StatePart {
    float* data;
    int64_t place_stride, rows, columns, stride;

    float* at(int64_t place) const { return data + place * place_stride; }
    void copy(const float* from, int64_t from_stride, float* to, int64_t to_stride) const {
        for (int64_t row = 0; row < rows; row++)
            std::copy_n(from + row * from_stride, columns, to + row * to_stride);
    }
};

constexpr int64_t STATE_TOKENS = 32;  // computed at once, so that their inputs stay in a cache

// Calls run(begin, end, state, stride) for all tokens of a row, at most STATE_TOKENS at a time, and
// writes the state where it belongs. The rows of `state` have a multiple of `width` columns: it is
// the row's place itself if it can be, else `scratch`.
template <typename Run>
void walk_state(const StateRow& row, const StatePart& part, int64_t width, float* scratch,
                Run run) {
    const int64_t scratch_stride = round_up(part.columns, width);
    bool in_place = row.last >= 0 && part.columns == scratch_stride;
    float* state = in_place ? part.at(row.place) : scratch;
    int64_t stride = in_place ? part.stride : scratch_stride;
    if (!in_place) std::fill_n(scratch, part.rows * scratch_stride, 0.0f);
    if (in_place && row.is_fresh) {
        for (int64_t i = 0; i < part.rows; i++) std::fill_n(state + i * stride, part.columns, 0.0f);
    } else if (!in_place && !row.is_fresh) {
        part.copy(part.at(row.place), part.stride, state, stride);
    }
    for (int64_t token = row.begin, stop; token < row.end; token = stop) {
        stop = std::min(row.end, token + STATE_TOKENS);
        if (row.last >= token) stop = std::min(stop, row.last + 1);
        if (row.copy >= token) stop = std::min(stop, row.copy + 1);
        run(token, stop, state, stride);
        if (stop - 1 == row.copy) part.copy(state, stride, part.at(row.copy_place), part.stride);
        if (stop - 1 == row.last) {
            if (!in_place) {
                part.copy(state, stride, part.at(row.place), part.stride);
            } else if (stop < row.end) {  // the place keeps it, while later tokens go on
                part.copy(state, stride, scratch, scratch_stride);
                state = scratch, stride = scratch_stride, in_place = false;
            }
        }
    }
}

// out[i] = function(x + bias) for the numbers of a column of [count, row], in one form for all.
template <typename T, typename Function>
inline void map_column(const T* x, int64_t row, float bias, int64_t count, float* out,
                       Function function) {
    for (int64_t i = 0; i < count; i += Vec::LANES) {
        float numbers[Vec::LANES] = {};
        for (int64_t k = 0; k < std::min<int64_t>(Vec::LANES, count - i); k++)
            numbers[k] = Number<T>::get(x[(i + k) * row]) + bias;
        store_some(function(Vec::load(numbers)), out + i, count - i);
    }
}

// ------------------------------------------------------------ short convolutions

constexpr int64_t CONV_CHANNELS = 1024, CONV_LEAST = 64;  // that one thread computes together

// All requests for the channels [first, first + count). TAPS: the number of taps, or 0 for any.
// memory: fp32 [taps + 1, CONV_CHANNELS] for weights and bias, then a state [taps - 1,
// CONV_CHANNELS].
template <typename T, int TAPS, typename Activation>
void conv_channels(const ShortConv& a, const Step& step, int64_t first, int64_t count,
                   float* memory, Activation activation) {
    const int64_t taps = TAPS ? TAPS : a.taps, before = taps - 1;
    float* bias = memory + taps * CONV_CHANNELS;
    T* old = (T*)(bias + CONV_CHANNELS);
    const T* weight = (const T*)a.weight + first * taps;
    for (int64_t i = 0; i < count; i++) {
        for (int64_t tap = 0; tap < taps; tap++)
            memory[tap * CONV_CHANNELS + i] = Number<T>::get(weight[i * taps + tap]);
        bias[i] = a.bias ? Number<T>::get(((const T*)a.bias)[first + i]) : 0.0f;
    }
    for (int64_t request = 0; request < step.num_requests; request++) {
        const StateRow row(step, request);
        const auto place_of = [&](int64_t place, int64_t i) {
            return (T*)a.state + place * a.state_row + i * a.channels + first;
        };
        for (int64_t i = 0; i < before; i++) {
            if (row.is_fresh) std::fill_n(old + i * CONV_CHANNELS, count, (T)0);
            else std::copy_n(place_of(row.place, i), count, old + i * CONV_CHANNELS);
        }
        const auto input = [&](int64_t token) -> const T* {  // of this step or before it
            return token >= row.begin ? (const T*)a.x + token * a.x_row + first
                                      : old + (token - row.begin + before) * CONV_CHANNELS;
        };
        const auto keep = [&](int64_t token, int64_t place) {  // the state after the token
            for (int64_t i = 0; i < before; i++)
                std::copy_n(input(token + 1 - before + i), count, place_of(place, i));
        };
        for (int64_t token = row.begin; token < row.end; token++) {
            T* out = (T*)a.out + token * a.channels + first;
            const T* inputs[TAPS ? TAPS : 1];
            for (int tap = 0; tap < TAPS; tap++) inputs[tap] = input(token - before + tap);
            const auto add = [&](int64_t i, auto load) ALWAYS_INLINE {
                Vec sum = Vec::load(bias + i);
                for (int64_t tap = 0; tap < taps; tap++)
                    sum =
                        Vec::fma(Vec::load(memory + tap * CONV_CHANNELS + i),
                                 load((TAPS ? inputs[tap] : input(token - before + tap)) + i), sum);
                return activation(sum);
            };
            int64_t i = 0;
            for (; i + Vec::LANES <= count; i += Vec::LANES)
                add(i, [](const T* p) { return Vec::load(p); }).store(out + i);
            if (i < count)
                store_some(add(i, [&](const T* p) { return load_some(p, count - i); }), out + i,
                           count - i);
        }
        if (row.last >= 0) keep(row.last, row.place);
        if (row.copy >= 0) keep(row.copy, row.copy_place);
    }
}

template <typename T, typename Activation>
void conv_all(const ShortConv& a, const Step& step, int64_t first, int64_t count, float* memory,
              Activation activation) {
    if (a.taps == 4) conv_channels<T, 4>(a, step, first, count, memory, activation);
    else if (a.taps == 3) conv_channels<T, 3>(a, step, first, count, memory, activation);
    else conv_channels<T, 0>(a, step, first, count, memory, activation);
}

void short_conv(const Call& call, const Step& step, const Worker& worker) {
    const ShortConv& a = (const ShortConv&)call;
    // wide blocks, of which rows are long, unless these are too few for the threads
    const int64_t share = round_up(ceil_div(a.channels, 3 * worker.count), CONV_LEAST),
                  width = std::min(CONV_CHANNELS, share), blocks = ceil_div(a.channels, width);
    float* memory = (float*)worker.scratch(2 * a.taps * CONV_CHANNELS * sizeof(float));
    for (int64_t block; (block = worker.next(blocks)) < blocks;) {
        const int64_t first = block * width, count = std::min(width, a.channels - first);
        with_gate(a.activation, [&](auto activation) {
            FOR_DTYPE(call.dtype, conv_all<T>(a, step, first, count, memory, activation));
        });
    }
}

// ------------------------------------------------------------ gated delta rule
//
// With S the state [key_size, value_size] before a token, e its decay and b its beta:
//
//   d = b (v - e S^T k),  o = e S^T q + d (k . q),  S = e S + k d^T
//
// The pass over S that adds k d^T of one token also sums S^T k and S^T q of the next one. Where
// each row of S has its own decay, S^T multiplies the products of the decays and k, or q.

constexpr int DELTA_VECS = 2, DELTA_COLUMNS = DELTA_VECS * Vec::LANES;
constexpr int DELTA_SUMS = 2;  // of every other row each, so that sums need not wait

// What the tokens [begin, end) of a head need, at most STATE_TOKENS. Keys and queries are
// normalised, and lie beside each other: [token][key_size]. `by_key` and `by_query` are what S is
// multiplied by: keys and queries, or, with BY_ROW, these times the decays of rows, which are
// `keeps`.
struct DeltaInputs {
    float *key, *query, *by_key, *by_query, *keeps;
    float keep[STATE_TOKENS], beta[STATE_TOKENS], dot[STATE_TOKENS];

    // BY_ROW takes the memory of five arrays, else of two
    static constexpr int arrays(bool by_row) { return by_row ? 5 : 2; }
    DeltaInputs(float* memory, int64_t size, bool by_row)
        : key(memory),
          query(memory + size),
          by_key(by_row ? memory + 2 * size : key),
          by_query(by_row ? memory + 3 * size : query),
          keeps(by_row ? memory + 4 * size : nullptr) {}
};

template <typename T>
void normalised(const T* x, int64_t size, float scale, float* out) {
    Vec sum;
    for (int64_t i = 0; i < size; i += Vec::LANES) {
        const Vec v = load_some(x + i, size - i);
        sum = Vec::fma(v, v, sum);
    }
    const Vec factor(scale / std::sqrt(sum.sum() + 1e-6f));
    for (int64_t i = 0; i < size; i += Vec::LANES)
        store_some(load_some(x + i, size - i) * factor, out + i, size - i);
}

inline float dot_of(const float* a, const float* b, int64_t size) {
    Vec sum;
    for (int64_t i = 0; i < size; i += Vec::LANES)
        sum = Vec::fma(load_some(a + i, size - i), load_some(b + i, size - i), sum);
    return sum.sum();
}

// The decays of the rows of one token, and its key and query times these.
template <typename T>
void prepare_decays(const GatedDeltaRule& a, int64_t head, int64_t token, Vec rate, int64_t offset,
                    DeltaInputs& to) {
    const T* decay = (const T*)a.decay + token * a.decay_row + head * a.decay_head;
    const float* bias = a.dt_bias + head * a.key_size;
    for (int64_t i = 0; i < a.key_size; i += Vec::LANES) {
        const int64_t left = a.key_size - i, at = offset + i;
        const Vec x = load_some(decay + i, left) + load_some(bias + i, left),
                  keep = exp(rate * softplus(x));
        store_some(keep, to.keeps + at, left);
        store_some(load_some(to.key + at, left) * keep, to.by_key + at, left);
        store_some(load_some(to.query + at, left) * keep, to.by_query + at, left);
    }
}

template <typename T, bool BY_ROW>
void prepare_delta(const GatedDeltaRule& a, int64_t head, int64_t begin, int64_t end,
                   DeltaInputs& to) {
    const int64_t of_key =
        a.is_interleaved ? head % a.key_heads : head / (a.value_heads / a.key_heads);
    const float scale = 1.0f / std::sqrt((float)a.key_size);
    const auto ask_for = [&](const T* x, int64_t size) {
        for (int64_t i = 0; i < size; i += 64 / (int64_t)sizeof(T)) __builtin_prefetch(x + i, 0, 2);
    };
    // the rows of other tokens are far away, and a token's sums wait for its value
    for (int64_t token = begin; end - begin > 1 && token < end; token++) {
        ask_for((const T*)a.key + token * a.key_row + of_key * a.key_head, a.key_size);
        ask_for((const T*)a.query + token * a.query_row + of_key * a.query_head, a.key_size);
        ask_for((const T*)a.value + token * a.value_row + head * a.value_head, a.value_size);
        if (BY_ROW)
            ask_for((const T*)a.decay + token * a.decay_row + head * a.decay_head, a.key_size);
    }
    for (int64_t token = begin; token < end; token++) {
        float *key = to.key + (token - begin) * a.key_size,
              *query = to.query + (token - begin) * a.key_size;
        normalised((const T*)a.key + token * a.key_row + of_key * a.key_head, a.key_size, 1.0f,
                   key);
        normalised((const T*)a.query + token * a.query_row + of_key * a.query_head, a.key_size,
                   scale, query);
        to.dot[token - begin] = dot_of(key, query, a.key_size);
    }
    const Vec rate = Vec() - exp(Vec(a.a_log[head]));
    if constexpr (BY_ROW)
        for (int64_t token = begin; token < end; token++)
            prepare_decays<T>(a, head, token, rate, (token - begin) * a.key_size, to);
    else
        map_column((const T*)a.decay + begin * a.decay_row + head, a.decay_row, a.dt_bias[head],
                   end - begin, to.keep, [&](Vec x) { return exp(rate * softplus(x)); });
    map_column((const T*)a.beta + begin * a.beta_row + head, a.beta_row, 0.0f, end - begin, to.beta,
               [](Vec x) { return Number<T>::round(sigmoid(x)); });
}

// One pass over DELTA_COLUMNS columns of S [rows, .]. UPDATE: S = keep * S + old_key change^T, with
// a `keep` for each row if BY_ROW. DOTS: of_key = S^T key and of_query = S^T query.
template <bool BY_ROW, bool UPDATE, bool DOTS>
inline ALWAYS_INLINE void delta_pass(float* state, int64_t stride, int64_t rows,
                                     const float* old_key, const float* keep, const Vec* change,
                                     const float* key, const float* query, Vec* of_key,
                                     Vec* of_query) {
    const Vec keep_all(UPDATE && !BY_ROW ? *keep : 1.0f);
    Vec keys[DELTA_SUMS][DELTA_VECS], queries[DELTA_SUMS][DELTA_VECS], changes[DELTA_VECS];
    for (int i = 0; UPDATE && i < DELTA_VECS; i++) changes[i] = change[i];
    const auto add = [&](int64_t row, int sum) ALWAYS_INLINE {
        for (int i = 0; i < DELTA_VECS; i++) {
            float* p = state + row * stride + i * Vec::LANES;
            Vec x = Vec::load(p);
            if (UPDATE) {
                x = Vec::fma(Vec(old_key[row]), changes[i],
                             x * (BY_ROW ? Vec(keep[row]) : keep_all));
                x.store(p);
            }
            if (DOTS) {
                keys[sum][i] = Vec::fma(Vec(key[row]), x, keys[sum][i]);
                queries[sum][i] = Vec::fma(Vec(query[row]), x, queries[sum][i]);
            }
        }
    };
    int64_t row = 0;
    for (; row + DELTA_SUMS <= rows; row += DELTA_SUMS)
        for (int sum = 0; sum < DELTA_SUMS; sum++) add(row + sum, sum);
    if (row < rows) add(row, 0);
    for (int i = 0; DOTS && i < DELTA_VECS; i++) {
        of_key[i] = keys[0][i] + keys[1][i];
        of_query[i] = queries[0][i] + queries[1][i];
    }
}

// DELTA_COLUMNS columns, of which the first `columns` count, for `count` tokens.
template <typename T, bool BY_ROW>
void delta_columns(const GatedDeltaRule& a, const DeltaInputs& in, float* state, int64_t stride,
                   const T* value, T* out, int64_t count, int64_t columns) {
    const int64_t size = a.key_size, out_row = a.value_heads * a.value_size;
    Vec of_key[DELTA_VECS], of_query[DELTA_VECS], change[DELTA_VECS];
    delta_pass<BY_ROW, false, true>(state, stride, size, nullptr, nullptr, nullptr, in.by_key,
                                    in.by_query, of_key, of_query);
    for (int64_t t = 0; t < count; t++) {
        const auto kept = [&](Vec x) { return BY_ROW ? x : Vec(in.keep[t]) * x; };
        for (int i = 0; i < DELTA_VECS; i++) {
            const int64_t column = i * Vec::LANES, left = columns - column;
            if (left <= 0) break;
            const Vec v = load_some(value + t * a.value_row + column, left);
            change[i] = Vec(in.beta[t]) * (v - kept(of_key[i]));
            store_some(Vec::fma(change[i], Vec(in.dot[t]), kept(of_query[i])),
                       out + t * out_row + column, left);
        }
        const float *key = in.key + t * size, *keep = BY_ROW ? in.keeps + t * size : in.keep + t;
        const int64_t next = (t + 1) * size;
        if (t + 1 < count)
            delta_pass<BY_ROW, true, true>(state, stride, size, key, keep, change, in.by_key + next,
                                           in.by_query + next, of_key, of_query);
        else
            delta_pass<BY_ROW, true, false>(state, stride, size, key, keep, change, nullptr,
                                            nullptr, nullptr, nullptr);
    }
}

template <typename T, bool BY_ROW>
void delta_rows(const GatedDeltaRule& a, const Step& step, const Worker& worker) {
    // whole heads, unless these are too few for the threads
    const int64_t heads = step.num_requests * a.value_heads,
                  blocks = ceil_div(a.value_size, DELTA_COLUMNS),
                  parts = heads >= 3 * worker.count ? 1 : blocks,
                  width = parts == 1 ? a.value_size : DELTA_COLUMNS, count = heads * parts;
    const int64_t numbers = STATE_TOKENS * a.key_size,
                  inputs = DeltaInputs::arrays(BY_ROW) * numbers;
    float* memory = (float*)worker.scratch((inputs + a.key_size * round_up(width, DELTA_COLUMNS)) *
                                           sizeof(float));
    DeltaInputs in(memory, numbers, BY_ROW);
    for (int64_t item; (item = worker.next(count)) < count;) {
        const int64_t head = item / parts % a.value_heads, first = item % parts * width,
                      columns = std::min(width, a.value_size - first);
        const StateRow row(step, item / (parts * a.value_heads));
        const StatePart part{a.state + head * a.key_size * a.value_size + first, a.state_row,
                             a.key_size, columns, a.value_size};
        walk_state(row, part, DELTA_COLUMNS, memory + inputs,
                   [&](int64_t begin, int64_t end, float* state, int64_t stride) {
                       prepare_delta<T, BY_ROW>(a, head, begin, end, in);
                       const T* value =
                           (const T*)a.value + begin * a.value_row + head * a.value_head + first;
                       T* out = (T*)a.out + (begin * a.value_heads + head) * a.value_size + first;
                       for (int64_t column = 0; column < columns; column += DELTA_COLUMNS)
                           delta_columns<T, BY_ROW>(a, in, state + column, stride, value + column,
                                                    out + column, end - begin, columns - column);
                   });
    }
}

void gated_delta_rule(const Call& call, const Step& step, const Worker& worker) {
    const GatedDeltaRule& a = (const GatedDeltaRule&)call;
    if (a.decays_rows) FOR_DTYPE(call.dtype, (delta_rows<T, true>(a, step, worker)));
    else FOR_DTYPE(call.dtype, (delta_rows<T, false>(a, step, worker)));
}

// ------------------------------------------------------------ selective scan

constexpr int SCAN_ROWS = REGISTERS == 32 ? 8 : 4;  // of the state [head_size, state_size] at once
constexpr int64_t SCAN_PART = 32;  // rows that one thread computes together, at most

// Rows of S [., width]: S = keep * S + change b^T, and S c, for one token. AHEAD: the next rows are
// fetched, since they are not in a cache.
template <int ROWS, bool AHEAD>
inline ALWAYS_INLINE void scan_rows(float* state, int64_t stride, int64_t width, Vec keep,
                                    const float* change, const float* b, const float* c,
                                    float* of_c) {
    Vec sums[ROWS], changes[ROWS];
    for (int row = 0; row < ROWS; row++) changes[row] = Vec(change[row]);
    for (int64_t i = 0; i < width; i += Vec::LANES) {
        const Vec key = Vec::load(b + i), query = Vec::load(c + i);
        for (int row = 0; row < ROWS; row++) {
            float* p = state + row * stride + i;
            if (AHEAD) __builtin_prefetch(p + ROWS * stride, 1);
            const Vec x = Vec::fma(changes[row], key, Vec::load(p) * keep);
            x.store(p);
            sums[row] = Vec::fma(x, query, sums[row]);
        }
    }
    if constexpr (ROWS % 4 == 0)
        for (int row = 0; row < ROWS; row += 4) Vec::sum4(sums + row, of_c + row);
    else
        for (int row = 0; row < ROWS; row++) of_c[row] = sums[row].sum();
}

// Tokens [begin, end) of `rows` rows of a head's state, from row `first` on. b and c [STATE_TOKENS,
// stride] are overwritten.
template <typename T>
void scan_tokens(const SelectiveScan& a, int64_t head, int64_t first, int64_t rows, int64_t begin,
                 int64_t end, float* state, int64_t stride, int64_t width, float* b, float* c) {
    const int64_t group = head / (a.heads / a.groups), count = end - begin;
    float dt[STATE_TOKENS], keep[STATE_TOKENS];
    map_column((const T*)a.dt + begin * a.dt_row + head, a.dt_row, a.dt_bias[head], count, dt,
               [](Vec x) { return softplus(x); });
    const Vec rate = Vec() - exp(Vec(a.a_log[head]));
    map_column(dt, 1, 0.0f, count, keep, [&](Vec x) { return exp(rate * x); });
    for (int64_t t = 0; t < count; t++) {
        const T* of_b = (const T*)a.b + (begin + t) * a.b_row + group * a.b_head;
        const T* of_c = (const T*)a.c + (begin + t) * a.c_row + group * a.c_head;
        for (int64_t i = 0; i < width; i += Vec::LANES) {
            load_some(of_b + i, a.state_size - i).store(b + t * width + i);
            load_some(of_c + i, a.state_size - i).store(c + t * width + i);
        }
    }
    for (int64_t t = 0; t < count; t++) {
        const T* x = (const T*)a.x + (begin + t) * a.x_row + head * a.x_head + first;
        T* out = (T*)a.out + ((begin + t) * a.heads + head) * a.head_size + first;
        float wide[SCAN_PART], change[SCAN_PART], sums[SCAN_PART];
        for (int64_t row = 0; row < rows; row++) {
            wide[row] = Number<T>::get(x[row]);
            change[row] = dt[t] * wide[row];
        }
        int64_t row = 0;
        const auto add = [&](auto size, auto ahead) {
            constexpr int ROWS = decltype(size)::value;
            for (; row + ROWS <= rows; row += ROWS)
                scan_rows<ROWS, decltype(ahead)::value>(state + row * stride, stride, width,
                                                        Vec(keep[t]), change + row, b + t * width,
                                                        c + t * width, sums + row);
        };
        if (count == 1) add(std::integral_constant<int, SCAN_ROWS>(), std::true_type());
        else add(std::integral_constant<int, SCAN_ROWS>(), std::false_type());
        add(std::integral_constant<int, 1>(), std::false_type());
        for (row = 0; row < rows; row++)
            put(out + row, __builtin_fmaf(a.d[head], wide[row], sums[row]));
    }
}

template <typename T>
void scan_states(const SelectiveScan& a, const Step& step, const Worker& worker) {
    const int64_t parts = ceil_div(a.head_size, SCAN_PART),
                  count = step.num_requests * a.heads * parts,
                  width = round_up(a.state_size, Vec::LANES), numbers = STATE_TOKENS * width;
    float* memory = (float*)worker.scratch((2 * numbers + SCAN_PART * width) * sizeof(float));
    for (int64_t item; (item = worker.next(count)) < count;) {
        const int64_t head = item / parts % a.heads, first = item % parts * SCAN_PART,
                      rows = std::min(SCAN_PART, a.head_size - first);
        const StateRow row(step, item / (parts * a.heads));
        const StatePart part{a.state + (head * a.head_size + first) * a.state_size, a.state_row,
                             rows, a.state_size, a.state_size};
        walk_state(row, part, Vec::LANES, memory + 2 * numbers,
                   [&](int64_t begin, int64_t end, float* state, int64_t stride) {
                       scan_tokens<T>(a, head, first, rows, begin, end, state, stride, width,
                                      memory, memory + numbers);
                   });
    }
}

void selective_scan(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, scan_states<T>((const SelectiveScan&)call, step, worker));
}
