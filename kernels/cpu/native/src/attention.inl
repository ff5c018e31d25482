// Causal attention over the paged cache. Work is divided into items: some consecutive tokens of one
// request (a query tile) with all query heads of one KV head, over the whole context they see or,
// where few items must occupy many threads, over SPLIT keys of it. A context is always summed in
// pieces of SPLIT keys that are joined in order, so the division of work has no influence on a
// result. Pieces and tiles before all rows' sliding windows are skipped.
//
// Few tokens wait for memory. A token's KV heads lie side by side in the cache, and reading one of
// them alone leaves most of the lines that the processor fetches ahead unused, so an item of few
// tokens has several KV heads: it computes a tile of keys for one after the other, and fetches the
// next tile of all of them in the order of memory.

constexpr double LOG2_E = 1.4426950408889634;     // scores are powers of 2 instead of e
constexpr int64_t EVERYTHING = int64_t{1} << 62;  // a window that no context exceeds
constexpr int64_t SPLIT = 512;                    // keys; a multiple of KEYS
// approximate rows of an item: (token, query head) pairs that share a tile's keys
constexpr int64_t ITEM_ROWS = 128;
// of the keys and values in a tile of all heads of an item: two tiles fit into a core's own cache
constexpr int64_t ITEM_TILE_BYTES = 1 << 18;

// The items of one request.
struct Request {
    int64_t index, first_token, num_tokens, context;
    int64_t first_split;  // the first split that the first token sees
    int64_t splits;       // 1: its items cover the whole context
    int64_t item_heads;   // KV heads of an item, but for the last ones
    int64_t first_item;
    int64_t first_partial;  // splits > 1: index of the first row of its pieces,
    int64_t first_join;     // and of the first item that joins them
};

// The list of items, equal on every thread.
struct Plan {
    const VisibleRange range;
    Request* requests;
    int64_t num_requests, tokens_per_tile, group;
    int64_t kv_heads;  // parts of one count each
    int64_t num_items = 0, num_joins = 0;
    int64_t num_partials = 0;  // rows

    int64_t tiles_of(const Request& r) const { return ceil_div(r.num_tokens, tokens_per_tile); }
    int64_t head_sets_of(const Request& r) const { return ceil_div(kv_heads, r.item_heads); }
    // for one KV head
    int64_t cost_of_tile(const Request& r) const {
        int64_t tokens = std::min(r.num_tokens, tokens_per_tile);
        return (tokens * group + 8) * std::min(r.context, range.window + tokens);
    }

    // a request may have no tokens, and then has no items
    static int64_t at_least_1(int64_t n) { return std::max<int64_t>(n, 1); }

    // number_bytes: of a number in the cache
    Plan(const Attention& a, const Step& step, int num_threads, int64_t number_bytes, void* memory)
        : range{a.sliding_window ? a.sliding_window : EVERYTHING, (float)(a.softcap * LOG2_E)} {
        requests = (Request*)memory;
        num_requests = step.num_requests;
        kv_heads = a.kv_heads * a.head_parts;
        group = a.heads / kv_heads;
        tokens_per_tile = std::max<int64_t>(1, ITEM_ROWS / group);
        const int64_t tile_bytes = KEYS * (a.head_dim + a.value_dim) * number_bytes;
        const int64_t heads_of_tile = ITEM_TILE_BYTES / tile_bytes * a.head_parts;
        int64_t total = 0;
        for (int64_t i = 0; i < num_requests; i++) {
            int64_t first = step.query_start_loc[i];
            int64_t num_tokens = step.query_start_loc[i + 1] - first, context = step.seq_lens[i];
            requests[i] = {i, first, num_tokens, context, range.first(context - num_tokens) / SPLIT,
                           1, 1};
            total += cost_of_tile(requests[i]) * tiles_of(requests[i]) * kv_heads;
        }
        std::sort(requests, requests + num_requests, [this](const Request& x, const Request& y) {
            int64_t left = cost_of_tile(x), right = cost_of_tile(y);
            return left != right ? left > right : x.index < y.index;
        });
        for (int64_t i = 0; i < num_requests; i++) {
            Request& r = requests[i];
            if (num_threads > 1 && cost_of_tile(r) * num_threads * 2 > total)
                r.splits = ceil_div(r.context, SPLIT) - r.first_split;
            // at least four items of this size for each thread
            const int64_t fair = total * r.splits / (4 * num_threads * at_least_1(cost_of_tile(r)));
            const int64_t num_rows = at_least_1(r.num_tokens * group);
            const int64_t fitting = std::min(ITEM_ROWS / num_rows, heads_of_tile);
            r.item_heads = std::clamp<int64_t>(std::min(fair, fitting), 1, kv_heads);
            r.first_item = num_items, r.first_partial = num_partials, r.first_join = num_joins;
            num_items += tiles_of(r) * r.splits * head_sets_of(r);
            if (r.splits > 1)
                num_partials += r.num_tokens * group * kv_heads * r.splits,
                    num_joins += tiles_of(r) * kv_heads;
        }
    }

    // The request of an item; `first` is Request::first_item or first_join.
    const Request& request_of(int64_t item, int64_t Request::* first) const {
        return std::upper_bound(
            requests, requests + num_requests, item,
            [first](int64_t item, const Request& r) { return item < r.*first; })[-1];
    }
};

#include "attention_vec.inl"
template <typename T, typename C>
struct RowsOf {
    using type = VecRows<T, C>;
};
#ifdef QUIRE_BF16
#include "attention_bf16.inl"
#ifdef QUIRE_AMX
#include "attention_amx.inl"
using Bf16Products = TileProducts;
#else
#include "attention_dot.inl"
using Bf16Products = DotProducts;
#endif
template <typename C>
struct RowsOf<uint16_t, C> {
    using type = Bf16Rows<C, Bf16Products>;
};
#endif

// Adjacent KV heads, counted in parts.
struct HeadSet {
    int64_t first, count;
};

// One thread's buffers, and the loop over an item. Activations are T, the cache holds numbers as C:
// T, or int8.
template <typename T, typename C>
struct Attender {
    using Rows = typename RowsOf<T, C>::type;
    const Attention& a;
    const Step& step;
    const Plan& plan;
    const int64_t running_row;
    float *total, *piece;  // [rows, running_row]
    Place* places;         // [rows]
    T whole_query[MAX_HEAD_DIM];
    Rows rows;
    // where the item begins that this thread probably takes next, if it is of few tokens
    const Request* soon = nullptr;
    int64_t soon_start = 0, soon_end = 0;
    HeadSet soon_heads = {};
    int64_t fetch_heads = 0;  // KV heads in the rows that are prefetched
    bool asked = false;       // the first tile of the next item has been prefetched

    static int64_t running_row_of(const Attention& a) {
        return Running::VALUES + Rows::value_row_of(a.value_dim);
    }
    static int64_t max_rows(const Attention& a) {
        return std::max(ITEM_ROWS, a.heads / a.kv_heads);
    }
    static size_t own_bytes(const Attention& a) {
        return round_up(max_rows(a) * (2 * running_row_of(a) * sizeof(float) + sizeof(Place)), 64);
    }
    static size_t bytes(const Attention& a) {
        return own_bytes(a) + Rows::bytes(a.head_dim, a.value_dim, max_rows(a));
    }

    Attender(const Attention& a, const Step& step, const Plan& plan, char* memory)
        : a(a),
          step(step),
          plan(plan),
          running_row(running_row_of(a)),
          total((float*)memory),
          piece(total + max_rows(a) * running_row),
          places((Place*)(piece + max_rows(a) * running_row)),
          rows(a.head_dim, a.value_dim,
               a.scale * LOG2_E / (IS_SCALED<C> ? hadamard_size(a.head_dim) : 1), plan.range,
               max_rows(a), memory + own_bytes(a)) {}

    const T* query_of(int64_t token, int64_t head) {
        const T* query = (const T*)a.query + token * a.query_row + head * a.query_head;
        if (!a.rotary_query) return query;
        std::memcpy(whole_query, query, a.value_dim * sizeof(T));
        std::memcpy(
            whole_query + a.value_dim,
            (const T*)a.rotary_query + token * a.rotary_query_row + head * a.rotary_query_head,
            (a.head_dim - a.value_dim) * sizeof(T));
        return whole_query;
    }

    // token: of the request's in this step.
    Place place_of(const Request& r, int64_t token) const {
        const int64_t position = r.context - r.num_tokens + token;
        int64_t last = position;
        if (a.sees_later)
            last = std::min(position + step.later_tokens[r.first_token + token], r.context - 1);
        return {position, last};
    }

    // Row: (head * tokens + token) * group + query head. num_rows: of one KV head.
    void load_queries(const Request& r, int64_t token, int64_t num_rows, const HeadSet& heads) {
        for (int64_t row = 0; row < num_rows; row++)
            places[row] = place_of(r, token + row / plan.group);
        for (int64_t i = 0; i < heads.count; i++)
            for (int64_t row = 0; row < num_rows; row++) {
                const int64_t head = (heads.first + i) * plan.group + row % plan.group;
                rows.set_query(i * num_rows, row, num_rows,
                               query_of(r.first_token + token + row / plan.group, head));
            }
    }

    // Locates the keys from `start` on: at most a tile of them, none from `end` on.
    void find_slots(const Request& r, int64_t start, int64_t end, int64_t kv_head,
                    Slots<C>& slots) const {
        const int32_t* blocks =
            step.block_tables + a.group * step.block_table_group + r.index * step.block_table_row;
        const BlockLayout<C> layout{a.block_size, a.kv_heads, a.head_dim, a.cache_block};
        const int64_t slot_size = a.kv_heads * a.head_dim, head = kv_head / a.head_parts;
        slots.count = (int)std::min<int64_t>(KEYS, std::max<int64_t>(end - start, 0));
        for (int key = 0; key < slots.count;) {
            int64_t block = (start + key) / a.block_size, offset = (start + key) % a.block_size;
            const C *keys = layout.numbers(a.key_cache, blocks[block], offset, head),
                    *values = layout.numbers(a.value_cache, blocks[block], offset, head);
            int start_key = key,
                stop = (int)std::min<int64_t>(slots.count, key + a.block_size - offset);
            for (; key < stop; key++, keys += slot_size, values += slot_size)
                slots.keys[key] = keys, slots.values[key] = values;
            if constexpr (IS_SCALED<C>) {
                const float* key_scales = layout.scale(a.key_cache, blocks[block], offset, head);
                const float* value_scales =
                    layout.scale(a.value_cache, blocks[block], offset, head);
                for (int i = start_key; i < stop; i++)
                    slots.key_scales[i] = key_scales++, slots.value_scales[i] = value_scales++;
            }
        }
    }

    // Begins to prefetch what follows the current tile of `heads`: the tile from `start` on or, if
    // the item ends there, the first of the next item. Its keys go on while scores are computed,
    // its values while values are added.
    void start_fetch(const Request& r, int64_t start, int64_t item_end, const HeadSet& heads,
                     Slots<C>& following) {
        const bool is_last = start >= item_end;
        asked = !is_last || soon;
        if (is_last && soon) find_slots(*soon, soon_start, soon_end, soon_heads.first, following);
        else find_slots(r, start, item_end, heads.first, following);
        fetch_heads = kv_heads_in(is_last && soon ? soon_heads : heads);
        rows.next_keys.start(following.keys, following.count, fetch_heads * a.head_dim);
        // the values of latent attention are in its keys
        rows.next_values.start(following.values, a.key_cache == a.value_cache ? 0 : following.count,
                               fetch_heads * a.head_dim);
    }
    // The share of the next tile's memory that is fetched beside the products of one head.
    void allow_fetch(int64_t head, const HeadSet& heads, const Slots<C>& following) {
        rows.next_keys.allow(head, heads.count), rows.next_values.allow(head, heads.count);
        for (int64_t i = fetch_heads * head / heads.count;
             i < fetch_heads * (head + 1) / heads.count; i++)
            Scales<C>::prefetch(following, i * a.block_size);
    }
    int64_t kv_heads_in(const HeadSet& heads) const {
        return (heads.first + heads.count - 1) / a.head_parts - heads.first / a.head_parts + 1;
    }

    // Adds keys [start, end) of the context, within one SPLIT, as far as some row sees them. A
    // head's sums follow those of the head before by `apart` floats.
    void attend_piece(const Request& r, int64_t start, int64_t end, int64_t item_end,
                      int64_t num_rows, const HeadSet& heads, float* running, int64_t apart) {
        for (int64_t i = 0; i < heads.count; i++)
            for (int64_t row = 0; row < num_rows; row++)
                Running::reset(running + i * apart + row * running_row, running_row);
        start = std::max(start, plan.range.first(places[0].position) / KEYS * KEYS);
        // the first key that the last row sees
        int64_t seen_by_last = plan.range.first(places[num_rows - 1].position);
        Slots<C> slots, following;
        if (!asked) {
            Fetch<C> keys, values;
            find_slots(r, start, end, heads.first, slots);
            const int64_t row = kv_heads_in(heads) * a.head_dim;
            keys.start(slots.keys, slots.count, row), keys.allow(0, 1), keys.all();
            values.start(slots.values, slots.count, row), values.allow(0, 1), values.all();
        }
        for (; start < end; start += KEYS) {
            start_fetch(r, start + KEYS, item_end, heads, following);
            for (int64_t i = 0; i < heads.count; i++) {
                find_slots(r, start, end, heads.first + i, slots);
                allow_fetch(i, heads, following);
                rows.load(slots, start,
                          places[0].last + 1 >= start + slots.count && seen_by_last <= start);
                rows.attend(i * num_rows, num_rows, places, running + i * apart, running_row);
            }
        }
    }

    // Prepares the prefetch for item number `item`.
    void look_ahead(int64_t item) {
        const Request& r = plan.request_of(item, &Request::first_item);
        soon = r.num_tokens == 1 ? &r : nullptr;
        if (!soon) return;
        const Place place = place_of(r, 0);
        const int64_t split = item_split(r, item - r.first_item);
        soon_heads = item_heads(r, item - r.first_item);
        soon_start = plan.range.first(place.position) / KEYS * KEYS, soon_end = place.last + 1;
        if (r.splits == 1) return;
        soon_start = std::max(soon_start, (r.first_split + split) * SPLIT);
        soon_end = std::min(soon_end, (r.first_split + split + 1) * SPLIT);
    }

    // row: the index of a row of the tile, whose sums are `sums`.
    void finish(const Request& r, int64_t token, int64_t row, int64_t kv_head, float* sums) {
        const int64_t head = kv_head * plan.group + row % plan.group;
        if (a.sinks) Running::divide_with_sink(sums, running_row, (float)(a.sinks[head] * LOG2_E));
        else Running::divide(sums, running_row);
        rows.store(sums, (T*)a.out + ((r.first_token + token + row / plan.group) * a.heads + head) *
                                         a.value_dim);
    }

    // A tile's rows in the shared memory of pieces.
    float* partial(const Request& r, float* partials, int64_t token, int64_t kv_head,
                   int64_t split) const {
        int64_t num_rows = tokens_of(r, token) * plan.group;
        return partials + (r.first_partial +
                           (token * plan.kv_heads * plan.group + kv_head * num_rows) * r.splits +
                           split * num_rows) *
                              running_row;
    }

    int64_t tokens_of(const Request& r, int64_t token) const {
        return std::min(plan.tokens_per_tile, r.num_tokens - token);
    }

    // Items of a request in order: the last query tile first, which sees most keys; then splits;
    // then sets of KV heads, which are adjacent in memory.
    HeadSet item_heads(const Request& r, int64_t item) const {
        const int64_t first = item % plan.head_sets_of(r) * r.item_heads;
        return {first, std::min(r.item_heads, plan.kv_heads - first)};
    }
    int64_t item_split(const Request& r, int64_t item) const {
        return item / plan.head_sets_of(r) % r.splits;
    }
    void attend_item(const Request& r, int64_t item, float* partials) {
        const HeadSet heads = item_heads(r, item);
        const int64_t split = item_split(r, item);
        int64_t token =
            (plan.tiles_of(r) - 1 - item / plan.head_sets_of(r) / r.splits) * plan.tokens_per_tile;
        int64_t num_tokens = tokens_of(r, token), num_rows = num_tokens * plan.group;
        load_queries(r, token, num_rows, heads);
        int64_t end = places[num_rows - 1].last + 1;
        if (r.splits > 1) {
            int64_t start = (r.first_split + split) * SPLIT;
            end = std::min(end, start + SPLIT);
            attend_piece(r, start, end, end, num_rows, heads,
                         partial(r, partials, token, heads.first, split),
                         num_rows * r.splits * running_row);
            return;
        }
        const int64_t apart = num_rows * running_row;
        int64_t first = plan.range.first(places[0].position) / SPLIT * SPLIT;
        attend_piece(r, first, std::min(end, first + SPLIT), end, num_rows, heads, total, apart);
        for (int64_t start = first + SPLIT; start < end; start += SPLIT) {
            attend_piece(r, start, std::min(end, start + SPLIT), end, num_rows, heads, piece,
                         apart);
            for (int64_t row = 0; row < heads.count * num_rows; row++)
                Running::join(total + row * running_row, piece + row * running_row, running_row);
        }
        for (int64_t i = 0; i < heads.count; i++)
            for (int64_t row = 0; row < num_rows; row++)
                finish(r, token, row, heads.first + i, total + i * apart + row * running_row);
    }

    // The second phase: joins the pieces of a KV head's rows of one query tile.
    void join_item(const Request& r, int64_t item, float* partials) {
        int64_t kv_head = item % plan.kv_heads, token = item / plan.kv_heads * plan.tokens_per_tile;
        int64_t num_rows = tokens_of(r, token) * plan.group;
        float* first = partial(r, partials, token, kv_head, 0);
        for (int64_t row = 0; row < num_rows; row++) {
            float* joined = first + row * running_row;
            for (int64_t split = 1; split < r.splits; split++)
                Running::join(joined, joined + split * num_rows * running_row, running_row);
            finish(r, token, row, kv_head, joined);
        }
    }
};

template <typename T, typename C>
void attend(const Attention& a, const Step& step, const Worker& worker) {
    size_t plan_bytes = round_up(step.num_requests * sizeof(Request), 64);
    char* memory = (char*)worker.scratch(plan_bytes + Attender<T, C>::bytes(a));
    Plan plan(a, step, worker.count, sizeof(C), memory);
    Attender<T, C> attender(a, step, plan, memory + plan_bytes);
    float* partials =
        plan.num_partials
            ? (float*)worker.shared(plan.num_partials * attender.running_row * sizeof(float))
            : nullptr;

    int64_t expected = -1;
    for (int64_t item; (item = worker.next(plan.num_items)) < plan.num_items;) {
        attender.asked &= item == expected;
        expected = worker.following(item, plan.num_items);
        if (expected != item) attender.look_ahead(expected);
        else attender.soon = nullptr;
        const Request& r = plan.request_of(item, &Request::first_item);
        attender.attend_item(r, item - r.first_item, partials);
    }
    if (!partials) return;
    worker.barrier();
    for (int64_t item; (item = worker.next(plan.num_joins)) < plan.num_joins;) {
        const Request& r = plan.request_of(item, &Request::first_join);
        attender.join_item(r, item - r.first_join, partials);
    }
}

void attention(const Call& call, const Step& step, const Worker& worker) {
    const Attention& a = (const Attention&)call;
    if (a.cache_dtype == INT8) FOR_DTYPE(call.dtype, (attend<T, int8_t>(a, step, worker)));
    else FOR_DTYPE(call.dtype, (attend<T, T>(a, step, worker)));
}
