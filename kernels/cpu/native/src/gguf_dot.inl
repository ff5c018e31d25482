// Linear layers directly on GGUF's blocks (gguf_types.inl). Included by quantized.inl.
// kernels/reference/gguf_linear.py specifies the arithmetic: x has a scale per 32 numbers. Every 32
// numbers of an output are an exact sum of products, times the scale of x, times that of the
// weights.

#ifdef QUIRE_I8MM
// The exact sums of a part of a block by products of matrices, for add_block
template <typename F, int ROWS, int VECTORS, typename Stored>
inline ALWAYS_INLINE void sum_pairs(const int8_t* numbers, int64_t stride, const int32_t* terms,
                                    int64_t terms_stride, int part, Stored stored, Ints* sum) {
    constexpr int LINES = BLOCK_SIZE / 4 / F::PARTS_OF_32;
    PairsOfSums<ROWS, VECTORS> pairs([&](int row) ALWAYS_INLINE {
        return F::OFFSET && !F::SIGNED ? terms[row * terms_stride + part] : 0;
    });
    written_out<LINES / 2>([&](int i) ALWAYS_INLINE {
        const int line = part * LINES + 2 * i;
        pairs.add(numbers + 4 * line, stride,
                  [&](int next, int v) ALWAYS_INLINE { return stored(line + next, v); });
    });
    pairs.copy_to(sum);
}
#endif

// Adds 32 numbers of x, block `block` of its rows, times those of VECTORS vectors of outputs.
// stored(line, v) are four numbers of each output of vector v, scale(part, v) and least(v) their
// scales.
template <typename F, int ROWS, int VECTORS, typename Stored, typename Scale, typename Least>
inline ALWAYS_INLINE void add_block(const QuantizedRows<F>& x, int64_t block, Stored stored,
                                    Scale scale, Least least, decltype(Vec::v)* total) {
    constexpr int LINES = BLOCK_SIZE / 4 / F::PARTS_OF_32, SUMS = ROWS * VECTORS,
                  RUN = F::SIGNED ? LINES : Ints::run_of(F::MOST, LINES);
    const int64_t stride = x.groups * F::GROUP, scales_stride = x.groups * BLOCKS,
                  terms_stride = x.groups * F::TERMS;
    const int8_t* numbers = x.numbers + block * BLOCK_SIZE;
    const float* scales = x.scales + block;
    const int32_t* terms = x.all_terms + block * (F::TERMS / BLOCKS);
    written_out<F::PARTS_OF_32>([&](int part) ALWAYS_INLINE {
        Ints sum[SUMS];
#ifdef QUIRE_I8MM
        constexpr int ALONE = ROWS > 1 ? 0 : ROWS;  // rows that are not in pairs
        if constexpr (!ALONE)
            sum_pairs<F, ROWS, VECTORS>(numbers, stride, terms, terms_stride, part, stored, sum);
#else
        constexpr int ALONE = ROWS;
#endif
        written_out<ALONE>([&](int row) ALWAYS_INLINE {
            Ints start;
            if constexpr (F::SIGNED) start = Ints::start_of_fours(terms[row * terms_stride]);
            else if constexpr (F::OFFSET) start = Ints::repeat32(terms[row * terms_stride + part]);
            written_out<VECTORS>([&](int v) ALWAYS_INLINE { sum[row * VECTORS + v] = start; });
        });
        written_out<ALONE ? LINES / RUN : 0>([&](int run) ALWAYS_INLINE {
            constexpr bool APART = !F::SIGNED && Ints::SUMS_OF_HALVES;
            Ints halves[SUMS];
            written_out<RUN>([&](int i) ALWAYS_INLINE {
                const int line = part * LINES + run * RUN + i;
                written_out<VECTORS>([&](int v) ALWAYS_INLINE {
                    const Ints w = stored(line, v);
                    written_out<ROWS>([&](int row) ALWAYS_INLINE {
                        const Ints four =
                            Ints::repeat32(four_at(numbers + row * stride + 4 * line));
                        Ints& s = (APART ? halves : sum)[row * VECTORS + v];
                        if constexpr (F::SIGNED) s = settled(Ints::add_bytes(s, w, four));
                        else s = settled(Ints::add_nibbles(s, w, four));
                    });
                });
            });
            if constexpr (APART)
                written_out<SUMS>(
                    [&](int i) ALWAYS_INLINE { sum[i] = Ints::add(sum[i], halves[i].whole()); });
        });
        written_out<VECTORS>([&](int v) ALWAYS_INLINE {
            const Vec of_weights = scale(part, v);
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                auto& to = total[row * VECTORS + v];
                to = Vec::fma(sum[row * VECTORS + v].to_floats() * Vec(scales[row * scales_stride]),
                              of_weights, Vec(to))
                         .v;
            });
        });
    });
    if constexpr (F::LEAST)
        written_out<VECTORS>([&](int v) ALWAYS_INLINE {
            const Vec of_weights = least(v);
            written_out<ROWS>([&](int row) ALWAYS_INLINE {
                auto& to = total[row * VECTORS + v];
                to = Vec::fma(Vec(float_of(terms[row * terms_stride])), of_weights, Vec(to)).v;
            });
        });
}

// A group of 256 numbers, or the `size` last ones, directly from the blocks
template <typename F, int ROWS, int PANELS>
inline ALWAYS_INLINE void add_blocks(const char* block, int64_t apart, const char* scales,
                                     int64_t scales_apart, const QuantizedRows<F>& x, int64_t group,
                                     int64_t size, const Blocks& soon, decltype(Vec::v)* total) {
    constexpr int VECTORS = PANELS * PARTS, SUBS = F::SUBS;
    constexpr int64_t SHOWN = BLOCK_SIZE * F::LINE_OF_K;
    int64_t at = group * BLOCKS;
    const int64_t end = at + size / BLOCK_SIZE;
    for (int64_t shown = 0; at < end; block += SUBS * SHOWN, scales += F::BLOCK_SCALES) {
        Vec of_parts[VECTORS][SUBS * F::PARTS_OF_32], leasts[VECTORS][SUBS];
        written_out<VECTORS>([&](int v) ALWAYS_INLINE {
            F::decode(BlockScales{scales, scales_apart, v}, of_parts[v], leasts[v]);
        });
#pragma GCC unroll 1
        for (int sub = 0; sub < SUBS; sub += F::WRITTEN_OUT)
            written_out<F::WRITTEN_OUT>([&](int i) ALWAYS_INLINE {
                written_out<SHOWN / 64>(
                    [&](int line) ALWAYS_INLINE { soon.ask_for<PANELS>(shown + 64 * line); });
                add_block<F, ROWS, VECTORS>(
                    x, at++,
                    [&](int line, int v) ALWAYS_INLINE {
                        return F::stored(vector_at(block, apart, v, Ints::BYTES), sub, i, line);
                    },
                    [&](int part, int v)
                        ALWAYS_INLINE { return of_parts[v][(sub + i) * F::PARTS_OF_32 + part]; },
                    [&](int v) ALWAYS_INLINE { return leasts[v][sub + i]; }, total);
                shown += SHOWN;
            });
    }
}

// Panels unpacked to bytes, by 32 numbers: numbers [8][16 outputs][4], scales [PARTS_OF_32][16],
// leasts [16]
template <typename Kind>
struct Unpacked {
    static constexpr int64_t NUMBERS = BLOCK_SIZE * PANEL, SCALES = PANEL * sizeof(float),
                             LEASTS = NUMBERS + Kind::PARTS_OF_32 * SCALES,
                             BYTES = LEASTS + Kind::LEAST * SCALES;
};

// Bytes of the next product's panels, which a tile of rows prefetches
struct Share {
    Blocks blocks;
    int64_t first, size;

    // Prefetches up to `done` of `all` equal parts, of which `asked` bytes have been.
    template <int PANELS>
    ALWAYS_INLINE void ask_for(int64_t& asked, int64_t done, int64_t all) const {
        for (; asked < done * size / all; asked += 64) blocks.ask_for<PANELS>(first + asked);
    }
};

// The few panels that all rows are multiplied by, unpacked once: those of the gate and those of the
// up half. Numbers are as stored, or WHOLE: signed bytes, without offset.
template <typename F, int BESIDE, bool WHOLE>
struct UnpackedPanels {
    using Panel = Unpacked<typename F::Kind>;

    const QuantizedLinear& call;
    const Worker& worker;
    const int64_t blocks, bytes;  // of a panel, unpacked
    char* memory = nullptr;
    int64_t unpacked[2] = {-1, -1};  // their first panels

    UnpackedPanels(const QuantizedLinear& call, const Worker& worker)
        : call(call),
          worker(worker),
          blocks(call.in_features / BLOCK_SIZE),
          bytes(blocks * Panel::BYTES) {}

    const char* of(const Panels& panels, int up) {
        if (!memory) memory = (char*)worker.scratch(2 * BESIDE * bytes);
        char* to = memory + up * BESIDE * bytes;
        if (unpacked[up] != panels.first)
            for (int64_t i = 0; i < panels.count; i++)
                unpack(panels.first + i * panels.apart, to + i * bytes);
        unpacked[up] = panels.first;
        return to;
    }

    Share share_of(const Next& next, int64_t place) const {
        const int64_t panel_bytes = blocks * BLOCK_SIZE * F::LINE_OF_K,
                      first = next.panels.first + place * next.panels.apart,
                      size = panel_bytes / next.shares;
        return {{(const char*)next.layer->weight + first * panel_bytes,
                 next.panels.apart * panel_bytes},
                next.share * size,
                size};
    }

private:
    __attribute__((noinline)) void unpack(int64_t panel, char* to) const {
        const char *numbers = (const char*)call.weight + panel * blocks * BLOCK_SIZE * F::LINE_OF_K,
                   *scales =
                       (const char*)call.scales + panel * scales_of_panel<F>(call.in_features);
        for (int64_t block = 0; block < blocks; block += F::SUBS) {
            Vec of_parts[PARTS][F::SUBS * F::PARTS_OF_32], leasts[PARTS][F::SUBS];
            written_out<PARTS>([&](int v) ALWAYS_INLINE {
                F::decode(BlockScales{scales, 0, v}, of_parts[v], leasts[v]);
            });
#pragma GCC unroll 1
            for (int sub = 0; sub < F::SUBS; sub += F::WRITTEN_OUT)
                written_out<F::WRITTEN_OUT>([&](int i) ALWAYS_INLINE {
                    written_out<PARTS>([&](int v) ALWAYS_INLINE {
                        const char* from = numbers + v * Ints::BYTES;
                        written_out<BLOCK_SIZE / 4>([&](int line) ALWAYS_INLINE {
                            auto four = F::stored(from, sub, i, line);
                            if constexpr (WHOLE && (F::SIGNED || F::ZERO))
                                four = four.minus_bytes(F::SIGNED ? 128 : F::ZERO);
                            four.store(to + line * WORDS + v * Ints::BYTES);
                        });
                        float* after = (float*)(to + Panel::NUMBERS) + v * Vec::LANES;
                        for (int part = 0; part < F::PARTS_OF_32; part++, after += PANEL)
                            of_parts[v][(sub + i) * F::PARTS_OF_32 + part].store(after);
                        if (F::LEAST) leasts[v][sub + i].store(after);
                    });
                    to += Panel::BYTES;
                });
            numbers += F::SUBS * BLOCK_SIZE * F::LINE_OF_K, scales += F::BLOCK_SCALES;
        }
    }
};

// Rows times unpacked panels, whose share of the next ones is prefetched meanwhile.
template <typename Kind, int ROWS, int PANELS>
__attribute__((noinline)) void multiply_unpacked(const char* from, int64_t blocks,
                                                 const QuantizedRows<Kind>& x, const Share& soon,
                                                 int64_t place, int up, Sums* sums) {
    using Panel = Unpacked<Kind>;
    constexpr int VECTORS = PANELS * PARTS;
    const int64_t apart = blocks * Panel::BYTES;
    int64_t asked = 0;
    decltype(Vec::v) total[ROWS * VECTORS];
    const Vec zero = settled(Vec());
    for (auto& sum : total) sum = zero.v;
    for (int64_t block = 0; block < blocks; block++, from += Panel::BYTES) {
        soon.ask_for<PANELS>(asked, block + 1, blocks);
        const auto floats = [&](int64_t at, int v) ALWAYS_INLINE {
            return Vec::load(
                (const float*)vector_at(from + at, apart, v, Vec::LANES * sizeof(float)));
        };
        add_block<Kind, ROWS, VECTORS>(
            x, block,
            [&](int line, int v) ALWAYS_INLINE {
                return Ints::load(vector_at(from + line * WORDS, apart, v, Ints::BYTES));
            },
            [&](int part, int v)
                ALWAYS_INLINE { return floats(Panel::NUMBERS + part * Panel::SCALES, v); },
            [&](int v) ALWAYS_INLINE { return floats(Panel::LEASTS, v); }, total);
    }
    written_out<ROWS>([&](int row) ALWAYS_INLINE {
        written_out<VECTORS>([&](int i) ALWAYS_INLINE {
            Vec(total[row * VECTORS + i])
                .store(sums[row][place + i / PARTS][up] + i % PARTS * Vec::LANES);
        });
    });
}

// Many rows of x: a few panels are unpacked, and all rows are multiplied by these.
template <typename F>
struct UnpackedForm {
    using Kind = typename F::Kind;
    using Panel = Unpacked<Kind>;
    static constexpr int MAX_ROWS = MAX_EXACT_SUMS / 2,
                         BESIDE = panels_beside(MAX_ROWS, MAX_EXACT_SUMS);
    using Unpacking = UnpackedPanels<F, BESIDE, false>;

    Unpacking unpacked;

    UnpackedForm(const QuantizedLinear& call, const Worker& worker) : unpacked(call, worker) {}

    static constexpr int panels_at_once(int64_t) { return BESIDE; }
    static constexpr bool one_stream(int64_t) { return false; }

    void multiply(int64_t rows, const Panels& panels, const Next& next, int up,
                  const QuantizedRows<F>& x, Sums* sums) {
        const char* data = unpacked.of(panels, up);
        if (panels.count == BESIDE)
            return multiply_exactly<MAX_ROWS, BESIDE>(rows, data, next, 0, up, x, sums);
        for (int64_t i = 0; i < panels.count; i++)
            multiply_exactly<MAX_ROWS, 1>(rows, data + i * unpacked.bytes, next, i, up, x, sums);
    }

private:
    template <int ROWS, int PANELS>
    void multiply_exactly(int64_t rows, const char* data, const Next& next, int64_t place, int up,
                          const QuantizedRows<F>& x, Sums* sums) const {
        if constexpr (ROWS > 1)
            if (rows != ROWS)
                return multiply_exactly<ROWS - 1, PANELS>(rows, data, next, place, up, x, sums);
        multiply_unpacked<Kind, ROWS, PANELS>(data, unpacked.blocks, x.template as<Kind>(),
                                              unpacked.share_of(next, place), place, up, sums);
    }
};
