// From logits to tokens. Rows are processed in groups of 64 tokens; most of the work needs only the
// largest logit of each group. A NaN is never the largest, so a row with a NaN gives an arbitrary
// token and does not affect other rows.

constexpr int64_t GROUP = 64;
// of a row that several threads share; a piece's result does not depend on the thread
constexpr int64_t GROUPS_PER_PIECE = 128;

inline int64_t num_groups(int64_t vocab_size) { return (vocab_size + GROUP - 1) / GROUP; }
inline int64_t num_pieces(int64_t vocab_size) {
    return (num_groups(vocab_size) + GROUPS_PER_PIECE - 1) / GROUPS_PER_PIECE;
}

// A piece of a row: groups [first, last), tokens [first * GROUP, end)
struct Piece {
    int64_t row, first, last, end;
    Piece(int64_t item, int64_t vocab_size) {
        row = item / num_pieces(vocab_size);
        first = item % num_pieces(vocab_size) * GROUPS_PER_PIECE;
        last = std::min(first + GROUPS_PER_PIECE, num_groups(vocab_size));
        end = std::min(last * GROUP, vocab_size);
    }
};

struct Candidate {
    float value;
    int32_t token;
};

// The largest of a group's logits [size]. `poison` becomes NaN if one of them is not finite.
inline float group_max(const float* logits, int64_t size, Vec& poison) {
    Vec most(-INFINITY);
    int64_t i = 0;
    for (; i + Vec::LANES <= size; i += Vec::LANES) {
        Vec x = Vec::load(logits + i);
        most = Vec::max(x, most);  // operand order: of a NaN and a number, the second is taken
        poison = Vec::fma(x, Vec(), poison);
    }
    if (i < size) {
        float rest[Vec::LANES] = {};
        std::fill(rest + (size - i), rest + Vec::LANES, -INFINITY);
        std::copy(logits + i, logits + size, rest);
        most = Vec::max(Vec::load(rest), most);
        for (; i < size; i++) poison = Vec::fma(Vec(logits[i]), Vec(), poison);
    }
    return most.largest();
}

inline float group_max(const float* row, int64_t group, int64_t vocab_size, Vec& poison) {
    return group_max(row + group * GROUP, std::min(GROUP, vocab_size - group * GROUP), poison);
}

// The first of `size` logits that equals `value`; 0 if none does.
inline int64_t index_of(const float* logits, int64_t size, float value) {
    for (int64_t i = 0; i < size; i++)
        if (logits[i] == value) return i;
    return 0;
}

struct ArgmaxPart {
    Candidate best;
    bool is_finite;
};

void argmax(const Call& call, const Step& step, const Worker& worker) {
    const Argmax& a = (const Argmax&)call;
    int64_t rows = rows_of(call, step), pieces = num_pieces(a.vocab_size);
    auto* parts = (ArgmaxPart*)worker.shared(rows * pieces * sizeof(ArgmaxPart));  // [rows, pieces]
    for (int64_t item; (item = worker.next(rows * pieces)) < rows * pieces;) {
        Piece piece(item, a.vocab_size);
        const float* row = a.logits + piece.row * a.logits_row;
        Vec poison;
        float most = -INFINITY;
        int64_t where = piece.first;
        for (int64_t group = piece.first; group < piece.last; group++) {
            float value = group_max(row, group, a.vocab_size, poison);
            if (value > most) most = value, where = group;
        }
        int64_t start = where * GROUP;
        int64_t token = start + index_of(row + start, std::min(GROUP, a.vocab_size - start), most);
        parts[item] = {{most, (int32_t)token}, poison.sum() == 0.0f};
    }
    worker.barrier();
    for (int64_t row; (row = worker.next(rows)) < rows;) {
        ArgmaxPart all = parts[row * pieces];
        for (int64_t i = 1; i < pieces; i++) {
            const ArgmaxPart& part = parts[row * pieces + i];
            if (part.best.value > all.best.value) all.best = part.best;
            all.is_finite &= part.is_finite;
        }
        a.out[row] = all.best.token;
        a.is_finite[row] = all.is_finite;
    }
}

// ---------------------------------------------------------------- random numbers
// (kernels/ops.py: random_gumbel)

constexpr float LARGEST_U = 1.0f - 0x1p-24f;
constexpr float MOST_NOISE = 22.88f;  // for u = 2**-33, with a margin

struct RandomKey {
    uint32_t seed[2], position[2];
    RandomKey(int64_t seed, int64_t position)
        : seed{(uint32_t)seed, (uint32_t)((uint64_t)seed >> 32)},
          position{(uint32_t)position, (uint32_t)((uint64_t)position >> 32)} {}
};

// u [GROUP] of a group's tokens: Philox4x32-10, one counter for four tokens.
inline void uniforms(int64_t group, const RandomKey& key, float* u) {
    constexpr int QUADS = GROUP / 4;
    uint64_t pairs[2][QUADS];
    for (int quad = 0; quad < QUADS; quad += Words::LANES) {
        Words c0 = Words::iota((uint32_t)(group * QUADS + quad)), c1(key.position[0]),
              c2(key.position[1]), c3(0u);
        for (uint32_t round = 0; round < 10; round++) {
            Words p = Words::product(c0, Words(0xD2511F53u)),
                  q = Words::product(c2, Words(0xCD9E8D57u));
            c0 = q.high() ^ c1 ^ Words(key.seed[0] + round * 0x9E3779B9u);
            c1 = q;
            c2 = p.high() ^ c3 ^ Words(key.seed[1] + round * 0xBB67AE85u);
            c3 = p;
        }
        Words::store_pairs(c0, c1, pairs[0] + quad);
        Words::store_pairs(c2, c3, pairs[1] + quad);
    }
    uint32_t words[GROUP];
    for (int i = 0; i < QUADS; i++)
        std::memcpy(words + 4 * i, &pairs[0][i], 8),
            std::memcpy(words + 4 * i + 2, &pairs[1][i], 8);
    for (int i = 0; i < GROUP; i++) u[i] = std::min(((float)words[i] + 0.5f) * 0x1p-32f, LARGEST_U);
}

inline float gumbel(float u) { return -std::log(-std::log1p(-u)); }

// ---------------------------------------------------------------- filters

constexpr float GREEDY_BELOW = 1e-5f;

// What the filters keep of a row: tokens before the cut in the order of logits (the lower token
// first among equals), whose scaled = (logit - largest) / temperature is at least least_scaled.
struct RowPlan {
    float largest, temperature, least_scaled;
    bool is_greedy;
    Candidate cut, argmax;

    float scaled(float logit) const { return (logit - largest) / temperature; }
    bool keeps(float logit, int32_t token) const {
        return (logit > cut.value) | ((logit == cut.value) & (token <= cut.token));
    }
};

inline bool comes_before(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.token < b.token);
}

// A candidate as a number, smaller for an earlier one. Sorting numbers is several times faster than
// sorting with a comparison function, which the standard library's code, compiled for every
// processor, cannot inline.
inline uint64_t order_key(float logit, int32_t token) {
    uint32_t bits;
    float value = logit + 0.0f;  // -0 equals 0
    std::memcpy(&bits, &value, 4);
    uint32_t descending = bits >> 31 ? bits : ~bits ^ 0x80000000u;
    return (uint64_t)descending << 32 | (uint32_t)token;
}
inline Candidate candidate_of(uint64_t key) {
    uint32_t descending = (uint32_t)(key >> 32),
             bits = descending >> 31 ? descending : ~(descending ^ 0x80000000u);
    Candidate candidate = {0, (int32_t)(uint32_t)key};
    std::memcpy(&candidate.value, &bits, 4);
    return candidate;
}

struct Row {
    const float* logits;     // [vocab_size]
    const float* group_max;  // [num_groups]
    int64_t vocab_size;
};

// The logits of a group [GROUP]. Those of the last one, which may have fewer, are copied and padded
// with -inf.
inline const float* group_of(const Row& row, int64_t group, float* padded) {
    int64_t start = group * GROUP, size = row.vocab_size - start;
    if (size >= GROUP) return row.logits + start;
    std::copy(row.logits + start, row.logits + start + size, padded);
    std::fill(padded + size, padded + GROUP, -INFINITY);
    return padded;
}

// Calls f(logit, token) for every token whose logit is at least `least`, in ascending order.
template <typename F>
inline void for_each_from(const Row& row, float least, F f) {
    for (int64_t group = 0; group < num_groups(row.vocab_size); group++) {
        if (!(row.group_max[group] >= least)) continue;
        int64_t end = std::min((group + 1) * GROUP, row.vocab_size);
        for (int64_t token = group * GROUP; token < end; token++)
            if (row.logits[token] >= least) f(row.logits[token], (int32_t)token);
    }
}

// The last token that a top_p filter keeps of `keys` [count], in order, with their `weights`;
// `before` is the mass before them, `mass` the mass to keep.
inline Candidate cut_by_mass(const uint64_t* keys, const double* weights, int64_t count,
                             double before, double mass) {
    int64_t kept = 1;
    for (before += weights[0]; kept < count && before < mass; kept++) before += weights[kept];
    return candidate_of(keys[kept - 1]);
}

// A number that at least `count` of the row's logits reach, and seldom many more. For any division
// of a row into parts, `count` parts have a maximum of at least the count-th largest of all maxima.
// `maxima` [vocab_size] is scratch memory.
float reached_by(const Row& row, int64_t count, float* maxima) {
    int64_t parts = num_groups(row.vocab_size);
    if (parts >= 2 * count) {
        std::copy(row.group_max, row.group_max + parts, maxima);
        // needs more parts than groups: part i has the tokens i, i + parts, i + 2 * parts, ...
    } else {
        parts = (4 * count + GROUP - 1) / GROUP * GROUP;
        if (2 * parts > row.vocab_size) return -INFINITY;
        std::fill(maxima, maxima + parts, -INFINITY);
        // the remaining tokens could only raise the number
        for (int64_t start = 0; start + parts <= row.vocab_size; start += parts)
            for (int64_t i = 0; i < parts; i += Vec::LANES)
                Vec::max(Vec::load(row.logits + start + i), Vec::load(maxima + i))
                    .store(maxima + i);
    }
    std::nth_element(maxima, maxima + (parts - count), maxima + parts);
    return maxima[parts - count];
}

// A thread's memory for one row.
struct Scratch {
    uint64_t* keys;   // [vocab_size]
    double* weights;  // [vocab_size]
    static size_t bytes(int64_t vocab_size) {
        return vocab_size * (sizeof(uint64_t) + sizeof(double));
    }
    Scratch(void* memory, int64_t vocab_size)
        : keys((uint64_t*)memory), weights((double*)(keys + vocab_size)) {}
};

// top_k, optionally with top_p.
void cut_to_top_k(RowPlan& plan, const Row& row, int64_t top_k, float top_p,
                  const Scratch& memory) {
    auto [keys, weights] = memory;
    int64_t count = 0;
    for_each_from(row, reached_by(row, top_k, (float*)weights),
                  [&](float logit, int32_t token) { keys[count++] = order_key(logit, token); });
    if (count < top_k) return;  // NaN took the place of the others
    std::nth_element(keys, keys + top_k - 1, keys + count);
    plan.cut = candidate_of(keys[top_k - 1]);
    if (top_p >= 1) return;
    std::sort(keys, keys + top_k);
    double total = 0;
    int64_t kept = 0;  // by min_p as well
    for (float scaled; kept < top_k &&
                       (scaled = plan.scaled(candidate_of(keys[kept]).value)) >= plan.least_scaled;
         kept++)
        total += weights[kept] = std::exp((double)scaled);
    if (kept) plan.cut = cut_by_mass(keys, weights, kept, 0, top_p * total);
}

// top_p of all that min_p keeps. The mass is summed by logit, in steps of 1/8 after the
// temperature; only the step that contains the cut has to be sorted.
void cut_to_top_p(RowPlan& plan, const Row& row, float top_p, const Scratch& memory) {
    constexpr int STEPS = 256;
    double mass[STEPS] = {};
    auto step_of = [](float scaled) { return (int)std::min(-scaled * 8.0f, (float)(STEPS - 1)); };
    float scaled[GROUP], exps[GROUP], padded[GROUP];
    for (int64_t group = 0; group < num_groups(row.vocab_size); group++) {
        if (!(plan.scaled(row.group_max[group]) >= plan.least_scaled)) continue;
        const float* logits = group_of(row, group, padded);
        for (int64_t i = 0; i < GROUP; i++) scaled[i] = plan.scaled(logits[i]);
        for (int64_t i = 0; i < GROUP; i += Vec::LANES) exp(Vec::load(scaled + i)).store(exps + i);
        for (int64_t i = 0; i < GROUP; i++)
            if (scaled[i] >= plan.least_scaled && scaled[i] <= 0)
                mass[step_of(scaled[i])] += exps[i];
    }
    double total = 0, before = 0;
    for (double m : mass) total += m;
    int step = 0;
    for (; step < STEPS - 1 && before + mass[step] < top_p * total; step++) before += mass[step];
    int64_t count = 0;
    // one more step, for rounding
    float least =
        step == STEPS - 1 ? -INFINITY : plan.largest - plan.temperature * (float)(step + 2) / 8.0f;
    for_each_from(row, least, [&](float logit, int32_t token) {
        float x = plan.scaled(logit);
        if (x >= plan.least_scaled && x <= 0 && step_of(x) == step)
            memory.keys[count++] = order_key(logit, token);
    });
    if (count == 0) return;  // only with a NaN
    std::sort(memory.keys, memory.keys + count);
    for (int64_t i = 0; i < count; i++)
        memory.weights[i] = std::exp((double)plan.scaled(candidate_of(memory.keys[i]).value));
    plan.cut = cut_by_mass(memory.keys, memory.weights, count, before, top_p * total);
}

RowPlan plan_row(const Sample& a, int64_t index, const Row& row, const Scratch& memory) {
    RowPlan plan;
    plan.temperature = a.temperature[index];
    plan.is_greedy = !(plan.temperature >= GREEDY_BELOW);
    int64_t groups = num_groups(row.vocab_size), where = 0;
    for (int64_t group = 1; group < groups; group++)
        if (row.group_max[group] > row.group_max[where]) where = group;
    plan.largest = row.group_max[where];
    int64_t start = where * GROUP;
    int64_t token =
        start + index_of(row.logits + start, std::min(GROUP, row.vocab_size - start), plan.largest);
    plan.argmax = {plan.largest, (int32_t)token};
    plan.cut = {-INFINITY, INT32_MAX};
    // The smallest fp32 number whose exponential is at least min_p, both in fp64.
    plan.least_scaled = a.min_p[index] > 0 ? (float)std::log((double)a.min_p[index]) : -INFINITY;
    if ((double)plan.least_scaled < std::log((double)a.min_p[index]))
        plan.least_scaled = std::nextafter(plan.least_scaled, INFINITY);
    if (plan.is_greedy) return plan;
    int64_t top_k = a.top_k[index];
    float top_p = a.top_p[index];
    if (0 < top_k && top_k < row.vocab_size) {
        cut_to_top_k(plan, row, top_k, top_p, memory);
    } else if (top_p < 1) {
        cut_to_top_p(plan, row, top_p, memory);
    }
    return plan;
}

// ---------------------------------------------------------------- the draw

// The token of a piece with the largest scaled + noise. Noise takes two logarithms, but a cheaper
// test shows whether a token can exceed the best so far: noise > d requires u < exp(-d).
Candidate draw(const RowPlan& plan, const Row& row, const RandomKey& key, const Piece& piece) {
    // a margin for rounding in the cheap test; candidates within it are computed in full
    constexpr float ROOM = 1.001f;
    float scaled[GROUP], u[GROUP], padded[GROUP];
    uniforms(plan.argmax.token / GROUP, key, u);
    Candidate best = {gumbel(u[plan.argmax.token % GROUP]), plan.argmax.token};
    for (int64_t group = piece.first; group < piece.last; group++) {
        float most = row.group_max[group];
        if (!(most >= plan.cut.value) || plan.scaled(most) < plan.least_scaled ||
            plan.scaled(most) + MOST_NOISE < best.value)
            continue;
        int32_t start = (int32_t)(group * GROUP);
        const float* logits = group_of(row, group, padded);
        for (int32_t i = 0; i < GROUP; i++) {
            float value = plan.scaled(logits[i]);
            scaled[i] =
                plan.keeps(logits[i], start + i) & (value >= plan.least_scaled) ? value : -INFINITY;
        }
        uniforms(group, key, u);
        Vec closest(-INFINITY);
        for (int64_t i = 0; i < GROUP; i += Vec::LANES)
            closest = Vec::max(
                exp(Vec::load(scaled + i) - Vec(best.value)) * Vec(ROOM) - Vec::load(u + i),
                closest);
        if (closest.largest() < 0) continue;
        for (int32_t i = 0; i < GROUP; i++) {
            if (!(scaled[i] + MOST_NOISE >= best.value)) continue;
            Candidate drawn = {scaled[i] + gumbel(u[i]), start + i};
            if (comes_before(drawn, best)) best = drawn;
        }
    }
    return best;
}

void sample(const Call& call, const Step& step, const Worker& worker) {
    const Sample& a = (const Sample&)call;
    int64_t rows = rows_of(call, step), groups = num_groups(a.vocab_size),
            pieces = num_pieces(a.vocab_size);
    // [rows] plans, [rows, pieces] best tokens, [rows, groups] largest logits
    char* memory = (char*)worker.shared(
        rows * (sizeof(RowPlan) + pieces * sizeof(Candidate) + groups * sizeof(float)));
    auto* plans = (RowPlan*)memory;
    auto* parts = (Candidate*)(plans + rows);
    auto* maxima = (float*)(parts + rows * pieces);
    auto row_at = [&](int64_t row) {
        return Row{a.logits + row * a.logits_row, maxima + row * groups, a.vocab_size};
    };
    for (int64_t item; (item = worker.next(rows * pieces)) < rows * pieces;) {
        Piece piece(item, a.vocab_size);
        Vec poison;
        for (int64_t group = piece.first; group < piece.last; group++)
            maxima[piece.row * groups + group] =
                group_max(a.logits + piece.row * a.logits_row, group, a.vocab_size, poison);
    }
    worker.barrier();
    Scratch scratch(worker.scratch(Scratch::bytes(a.vocab_size)), a.vocab_size);
    for (int64_t row; (row = worker.next(rows)) < rows;)
        plans[row] = plan_row(a, row, row_at(row), scratch);
    worker.barrier();
    for (int64_t item; (item = worker.next(rows * pieces)) < rows * pieces;) {
        Piece piece(item, a.vocab_size);
        const RowPlan& plan = plans[piece.row];
        if (!plan.is_greedy)
            parts[item] = draw(plan, row_at(piece.row),
                               RandomKey(a.seeds[piece.row], a.positions[piece.row]), piece);
    }
    worker.barrier();
    for (int64_t row; (row = worker.next(rows)) < rows;) {
        Candidate best = plans[row].argmax;
        if (!plans[row].is_greedy)
            best =
                *std::min_element(parts + row * pieces, parts + (row + 1) * pieces, comes_before);
        a.out[row] = best.token;
    }
}

// ---------------------------------------------------------------- log-probabilities

// log of the sum of exp(logit - largest): lanes within a group in fp32, groups in fp64, in a fixed
// order.
inline double log_sum(const Row& row, float largest) {
    float padded[GROUP];
    double total = 0;
    for (int64_t group = 0; group < num_groups(row.vocab_size); group++) {
        const float* logits = group_of(row, group, padded);
        Vec sum;
        for (int64_t i = 0; i < GROUP; i += Vec::LANES)
            sum = sum + exp(Vec::load(logits + i) - Vec(largest));
        total += sum.sum();
    }
    return std::log(total);
}

void gather_logprobs(const Call& call, const Step& step, const Worker& worker) {
    const GatherLogprobs& a = (const GatherLogprobs&)call;
    int64_t rows = rows_of(call, step), groups = num_groups(a.vocab_size);
    auto [keys, weights] = Scratch(
        worker.scratch(Scratch::bytes(a.vocab_size) + groups * sizeof(float)), a.vocab_size);
    auto* maxima = (float*)(weights + a.vocab_size);
    for (int64_t index; (index = worker.next(rows)) < rows;) {
        Row row = {a.logits + index * a.logits_row, maxima, a.vocab_size};
        Vec poison;
        float largest = -INFINITY;
        for (int64_t group = 0; group < groups; group++) {
            maxima[group] = group_max(row.logits, group, a.vocab_size, poison);
            largest = std::max(largest, maxima[group]);
        }
        double log_total = log_sum(row, largest);
        int32_t* ids = a.ids + index * (a.k + 1);
        float* logprobs = a.logprobs + index * (a.k + 1);
        auto put = [&](int64_t place, int32_t token) {
            ids[place] = token;
            logprobs[place] = (float)((double)row.logits[token] - largest - log_total);
        };
        int32_t chosen = (int32_t)a.token_ids[index], likelier = 0;
        for (int64_t token = 0; token < a.vocab_size; token++)
            likelier += row.logits[token] > row.logits[chosen];
        a.ranks[index] = likelier + 1;
        int64_t count = 0;
        if (a.k > 0)
            for_each_from(
                row, reached_by(row, a.k, (float*)weights),
                [&](float logit, int32_t token) { keys[count++] = order_key(logit, token); });
        int64_t found = std::min(count, a.k);
        if (found < count) std::nth_element(keys, keys + found, keys + count);
        std::sort(keys, keys + found);
        put(0, chosen);
        // fewer only with a NaN
        for (int64_t i = 0; i < a.k; i++)
            put(i + 1, i < found ? candidate_of(keys[i]).token : chosen);
    }
}

void spread_logits(const Call& call, const Step& step, const Worker& worker) {
    const SpreadLogits& a = (const SpreadLogits&)call;
    constexpr int64_t PIECE = 8192;
    const int64_t pieces = ceil_div(a.vocab_size, PIECE), count = rows_of(a, step) * pieces;
    const int32_t* ids_end = a.token_ids + a.size;
    for (int64_t item; (item = worker.next(count)) < count;) {
        const int64_t row = item / pieces, first = item % pieces * PIECE,
                      end = std::min(first + PIECE, a.vocab_size);
        const float* x = a.x + row * a.x_row;
        float* out = a.out + row * a.out_row;
        std::fill(out + first, out + end, (float)a.absent);
        const int32_t* id = std::lower_bound(a.token_ids, ids_end, (int32_t)first);
        for (; id < ids_end && *id < end; id++) out[*id] = x[id - a.token_ids];
    }
}
