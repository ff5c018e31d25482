// Linear layers of several experts in one call, over quantized weights (abi.h: ExpertsLinear).
// Included by quantized.inl. Every place's row of x is quantized first; an item is then one of one
// expert's product with its places.

// A layer of all experts, whatever its type.
struct ExpertLayers {
    // of the quantized rows of so many places
    virtual size_t bytes(int64_t places) const = 0;
    virtual void use(void* memory, int64_t places) = 0;
    virtual void quantize(int64_t place, const void* x, int32_t dtype) = 0;
    // The products of one expert, valid until the next call.
    virtual Products& start(const QuantizedLinear& layer, int64_t place, int64_t rows) = 0;
};

template <typename Dot>
struct ExpertLayersOf final : ExpertLayers {
    using X = QuantizedRows<Dot>;
    using Forms = quantized::Forms<Dot>;

    template <typename Form>
    struct Current {
        const QuantizedLinear layer;
        Form form;
        ProductsOf<Form, Dot> products;

        Current(const QuantizedLinear& layer, const Worker& worker, const X& x)
            : layer(layer),
              form(this->layer, worker),
              products(form, x, round_up(layer.in_features, Dot::DEPTH) * Dot::LINE_OF_K) {}
    };

    const int64_t in_features, groups = ceil_div(in_features, Dot::GROUP);
    const Worker& worker;
    X x{nullptr, 0, 0};
    std::optional<Current<typename Forms::Few>> few;
    std::optional<Current<typename Forms::Many>> many;

    ExpertLayersOf(int64_t in_features, const Worker& worker)
        : in_features(in_features), worker(worker) {}

    size_t bytes(int64_t places) const override { return X::bytes(places, groups); }
    void use(void* memory, int64_t places) override { x = X(memory, places, groups); }
    void quantize(int64_t place, const void* row, int32_t dtype) override {
        FOR_DTYPE(dtype, x.quantize(place, (const T*)row, in_features));
    }
    Products& start(const QuantizedLinear& layer, int64_t place, int64_t rows) override {
        few.reset();
        many.reset();
        if (rows >= Forms::FROM) return many.emplace(layer, worker, x.from(place)).products;
        return few.emplace(layer, worker, x.from(place)).products;
    }
};

template <typename T>
void multiply_experts(ExpertLayers& layers, const ExpertsLinear& a, const Worker& worker) {
    const int64_t places = a.starts[a.count];
    if (places == 0) return;
    layers.use(worker.shared(layers.bytes(places)), places);
    for (int64_t place; (place = worker.next(places)) < places;)
        layers.quantize(place, (const T*)a.x + (a.tokens ? a.tokens[place] : place) * a.x_row,
                        a.dtype);
    worker.barrier();
    const auto rows_of = [&](int64_t expert) { return a.starts[expert + 1] - a.starts[expert]; };
    const auto layer_of_expert = [&](int64_t expert) {
        QuantizedLinear layer = layer_of<QuantizedLinear>(a, expert, a.starts[expert]);
        layer.scales = (const void*)a.all_scales[expert];
        return layer;
    };
    int64_t active = 0;
    for (int64_t expert = 0; expert < a.count; expert++) active += rows_of(expert) > 0;
    ExpertItems all;
    for (int64_t expert = 0; expert < a.count; expert++) {
        const int64_t rows = rows_of(expert);
        if (rows == 0) continue;
        const QuantizedLinear layer = layer_of_expert(expert);
        Products& products = layers.start(layer, a.starts[expert], rows);
        all.add(expert, QuantizedItems<T>(products, layer, 0, rows, worker.count, active).count);
    }
    for (int64_t item = worker.next(all.count); item < all.count;) {
        const int64_t i = all.find(item), expert = all.experts[i], begin = all.begin_of(i);
        const QuantizedLinear layer = layer_of_expert(expert);
        Products& products = layers.start(layer, a.starts[expert], rows_of(expert));
        const QuantizedItems<T> items(products, layer, 0, rows_of(expert), worker.count, active);
        // the first item of the next expert follows the last one, with as many panels probably
        const QuantizedLinear after =
            i + 1 < all.num_experts ? layer_of_expert(all.experts[i + 1]) : layer;
        // all items of this expert that the thread gets one after the other
        while (begin <= item && item < all.ends[i]) {
            const int64_t following = worker.following(item, all.count);
            if (following < all.ends[i]) items.run(item - begin, following - begin, layer);
            else items.run(item - begin, 0, after);
            item = worker.next(all.count);
        }
    }
}

template <typename Dot>
void experts_linear_of(const Call& call, const Step&, const Worker& worker) {
    const ExpertsLinear& a = (const ExpertsLinear&)call;
    ExpertLayersOf<Dot> layers(a.in_features, worker);
    FOR_DTYPE(call.dtype, multiply_experts<T>(layers, a, worker));
}

#if !defined(QUIRE_BF16) || defined(QUIRE_AMX)
inline void experts_linear_blocks(const Call& call, const Step& step, const Worker& worker) {
    switch (((const ExpertsLinear&)call).kind) {
#define CASE(F)         \
    case OP_LINEAR_##F: \
        return experts_linear_of<F>(call, step, worker)
        FOR_BLOCK_TYPES(CASE);
#undef CASE
    }
}
#endif

// Rows per expert that has any, rounded up
inline int64_t rows_of_expert(const ExpertsLinear& a) {
    int64_t active = 0;
    for (int64_t expert = 0; expert < a.count; expert++)
        active += a.starts[expert + 1] > a.starts[expert];
    return active ? ceil_div(a.starts[a.count], active) : 0;
}
