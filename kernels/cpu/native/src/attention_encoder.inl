// Attention of text encoders: in both directions, over the keys and values of the step itself
// (abi.h: EncoderAttention). An item is some consecutive tokens of one request (a query tile) with
// all query heads of one KV head, or with one query head where there is a bias. It passes over the
// request's tiles of keys in order, so a row's bits depend on its request alone.

// The list of items, equal on every thread: by request, then by KV head, then by query tile.
struct EncoderPlan {
    const Step& step;
    const int64_t group, sets, tokens_per_tile;  // query heads of an item; sets of them
    int64_t* first_items;                        // [num_requests + 1]

    EncoderPlan(const EncoderAttention& a, const Step& step, void* memory)
        : step(step),
          group(a.bias ? 1 : a.heads / a.kv_heads),
          sets(a.heads / group),
          tokens_per_tile(std::max<int64_t>(1, ITEM_ROWS / group)),
          first_items((int64_t*)memory) {
        first_items[0] = 0;
        for (int64_t i = 0; i < step.num_requests; i++)
            first_items[i + 1] = first_items[i] + ceil_div(length_of(i), tokens_per_tile) * sets;
    }
    static size_t bytes(const Step& step) {
        return round_up((step.num_requests + 1) * sizeof(int64_t), 64);
    }

    int64_t first_token_of(int64_t request) const { return step.query_start_loc[request]; }
    int64_t length_of(int64_t request) const {
        return step.query_start_loc[request + 1] - step.query_start_loc[request];
    }
    int64_t num_items() const { return first_items[step.num_requests]; }
    int64_t request_of(int64_t item) const {
        return std::upper_bound(first_items, first_items + step.num_requests + 1, item) -
               first_items - 1;
    }
};

// One thread's buffers, and the computation of an item.
template <typename T>
struct EncoderAttender {
    using Rows = typename RowsOf<T, T>::type;
    const EncoderAttention& a;
    const EncoderPlan& plan;
    const int64_t running_row;
    float* running;      // [rows, running_row]
    int64_t* positions;  // [rows]
    float* bias;         // of distances from -farthest - KEYS on, see Sight
    Rows rows;

    static int64_t running_row_of(const EncoderAttention& a) {
        return Running::VALUES + Rows::value_row_of(a.head_dim);
    }
    static int64_t max_rows(const EncoderAttention& a) {
        return std::max(ITEM_ROWS, a.heads / a.kv_heads);
    }
    static int64_t bias_size(const EncoderAttention& a) {
        return a.bias ? 2 * (a.bias_distance + KEYS) : 0;
    }
    static size_t own_bytes(const EncoderAttention& a) {
        return round_up(max_rows(a) * (running_row_of(a) * sizeof(float) + sizeof(int64_t)) +
                            bias_size(a) * sizeof(float),
                        64);
    }
    static size_t bytes(const EncoderAttention& a) {
        return own_bytes(a) + Rows::bytes(a.head_dim, max_rows(a));
    }

    EncoderAttender(const EncoderAttention& a, const EncoderPlan& plan, char* memory)
        : a(a),
          plan(plan),
          running_row(running_row_of(a)),
          running((float*)memory),
          positions((int64_t*)(running + max_rows(a) * running_row)),
          bias((float*)(positions + max_rows(a))),
          rows(a.head_dim, a.scale * LOG2_E,
               Sight{a.window ? a.window + 1 : EVERYTHING, 0, a.window ? a.window : EVERYTHING,
                     a.bias ? bias + a.bias_distance + KEYS : nullptr, a.bias_distance},
               max_rows(a), memory + own_bytes(a)) {}

    void load_bias(int64_t head) const {
        const int64_t farthest = a.bias_distance;
        const float* from = a.bias + head * (2 * farthest + 1);
        for (int64_t i = 0; i < bias_size(a); i++)
            bias[i] = from[std::min(std::max<int64_t>(i - KEYS, 0), 2 * farthest)] * (float)LOG2_E;
    }

    void attend_item(int64_t item) {
        const int64_t request = plan.request_of(item), index = item - plan.first_items[request],
                      first = plan.first_token_of(request), length = plan.length_of(request),
                      tiles = ceil_div(length, plan.tokens_per_tile), set = index / tiles,
                      token = index % tiles * plan.tokens_per_tile,
                      num_tokens = std::min(plan.tokens_per_tile, length - token),
                      num_rows = num_tokens * plan.group, head = set * plan.group;
        const int64_t kv_head = head / (a.heads / a.kv_heads);
        const T *keys = (const T*)a.key + first * a.key_row + kv_head * a.key_head,
                *values = (const T*)a.value + first * a.value_row + kv_head * a.value_head;
        if (a.bias) load_bias(head);
        for (int64_t row = 0; row < num_rows; row++) {  // token * group + head
            positions[row] = token + row / plan.group;
            rows.set_query(row, num_rows,
                           (const T*)a.query + (first + positions[row]) * a.query_row +
                               (head + row % plan.group) * a.query_head);
            Running::reset(running + row * running_row, running_row);
        }
        const int64_t last = token + num_tokens - 1;
        int64_t start = 0, end = length;
        if (a.window) {
            start = std::max<int64_t>(token - a.window, 0) / KEYS * KEYS;
            end = std::min(last + a.window + 1, length);
        }
        Slots<T> slots, none;
        for (; start < end; start += KEYS) {
            slots.count = (int)std::min<int64_t>(KEYS, length - start);
            for (int key = 0; key < slots.count; key++) {
                slots.keys[key] = keys + (start + key) * a.key_row;
                slots.values[key] = values + (start + key) * a.value_row;
            }
            const bool seen_by_all = !a.window || (last - a.window <= start &&
                                                   start + slots.count <= token + a.window + 1);
            rows.load(slots, none, start, seen_by_all);
            rows.attend(num_rows, positions, running, running_row);
        }
        T* out = (T*)a.out + (first * a.heads + head) * a.head_dim;
        for (int64_t row = 0; row < num_rows; row++) {
            float* sums = running + row * running_row;
            Running::divide(sums, running_row);
            rows.store(sums, out + (positions[row] * a.heads + row % plan.group) * a.head_dim);
        }
    }
};

template <typename T>
void attend_both_ways(const EncoderAttention& a, const Step& step, const Worker& worker) {
    const size_t plan_bytes = EncoderPlan::bytes(step);
    char* memory = (char*)worker.scratch(plan_bytes + EncoderAttender<T>::bytes(a));
    const EncoderPlan plan(a, step, memory);
    EncoderAttender<T> attender(a, plan, memory + plan_bytes);
    for (int64_t item; (item = worker.next(plan.num_items())) < plan.num_items();)
        attender.attend_item(item);
}

void encoder_attention(const Call& call, const Step& step, const Worker& worker) {
    FOR_DTYPE(call.dtype, attend_both_ways<T>((const EncoderAttention&)call, step, worker));
}
