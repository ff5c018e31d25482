// Packs linear layers' weights in the layout that linear.inl reads.
#include <algorithm>
#include <cstring>

#include "abi.h"
#include "pool.h"
#include "words.h"

namespace {

constexpr int64_t PANEL = 16;

struct Packing {
    const char* weight;
    int64_t row_bytes;  // from one row to the next
    int64_t width;      // bytes of a number
    int64_t out_features, in_features;
    char* packed;
};

// Four lines of four rows: 16 bytes of each row become 16 bytes of each line. The stores bypass the
// caches, because the result is not read before all is packed.
inline void transpose(const char* weight, int64_t row_bytes, char* packed) {
    Four x[4];
    for (int row = 0; row < 4; row++) x[row] = load_four(weight + row * row_bytes);
    transpose_fours(x);
    for (int line = 0; line < 4; line++) stream_four(packed + line * PANEL * 4, x[line]);
}

// A line of a panel holds 4 bytes of each of its 16 rows: one fp32 number or a pair of bf16.
void pack_panel(const Packing& p, int64_t panel) {
    int64_t used = p.in_features * p.width, lines = (used + 3) / 4;
    int64_t rows = std::min(PANEL, p.out_features - panel * PANEL);
    const char* weight = p.weight + panel * PANEL * p.row_bytes;
    char* packed = p.packed + panel * lines * PANEL * 4;
    if (rows < PANEL) std::memset(packed, 0, lines * PANEL * 4);
    int64_t line = 0;
    if (rows == PANEL)
        for (; line + 4 <= used / 4; line += 4)
            for (int64_t row = 0; row < PANEL; row += 4)
                transpose(weight + row * p.row_bytes + line * 4, p.row_bytes,
                          packed + (line * PANEL + row) * 4);
    for (; line < used / 4; line++)
        for (int64_t row = 0; row < rows; row++)
            std::memcpy(packed + (line * PANEL + row) * 4, weight + row * p.row_bytes + line * 4,
                        4);
    if (used % 4 != 0) {
        char* last = packed + (lines - 1) * PANEL * 4;
        std::memset(last, 0, PANEL * 4);
        for (int64_t row = 0; row < rows; row++)
            std::memcpy(last + row * 4, weight + row * p.row_bytes + used - 2, 2);
    }
}

void pack(const Worker& worker, void* argument, int32_t) {
    const Packing& p = *static_cast<Packing*>(argument);
    int64_t panels = (p.out_features + PANEL - 1) / PANEL;
    for (int64_t panel; (panel = worker.next(panels)) < panels;) pack_panel(p, panel);
    // makes the stores that bypass the caches visible before the other threads are notified
    end_streams();
}

}  // namespace

void quire_pack_linear(const void* weight, int64_t weight_row, int32_t dtype, int64_t out_features,
                       int64_t in_features, void* packed) {
    int64_t width = dtype == BF16 ? 2 : 4;
    Packing all{(const char*)weight, weight_row * width, width,
                out_features,        in_features,        (char*)packed};
    run_on_all(pack, &all, 1);
}
