// Packs the blocks of a GGUF file in the layout that gguf_types.inl states.
#include <algorithm>
#include <cstring>

#include "abi.h"
#include "pool.h"
#include "words.h"

namespace {

constexpr int64_t PANEL = 16;

struct Packing {
    const char* const* rows;
    int64_t num_rows, num_blocks;
    const BlockLayout& layout;
    char *numbers, *scales;
};

// 16 bytes of each of four rows become four lines of 16 bytes
inline void transpose(const char* const* rows, int64_t at, char* packed) {
    Four x[4];
    for (int row = 0; row < 4; row++) x[row] = load_four(rows[row] + at);
    transpose_fours(x);
    for (int line = 0; line < 4; line++) store_four(packed + line * PANEL * 4, x[line]);
}

// Bytes [begin, end) of a block of 16 rows: pieces of `width` bytes of the rows side by side
template <int WIDTH>
inline char* lay_out(const char* const* rows, int64_t begin, int64_t end, char* packed) {
    int64_t at = begin;
    if (WIDTH == 4)
        for (; at + 16 <= end; at += 16, packed += 16 * PANEL)
            for (int64_t row = 0; row < PANEL; row += 4)
                transpose(rows + row, at, packed + row * 4);
    for (; at < end; at += WIDTH)
        for (int64_t row = 0; row < PANEL; row++, packed += WIDTH)
            std::memcpy(packed, rows[row] + at, WIDTH);
    return packed;
}

void pack_panel(const Packing& p, int64_t panel, const char* zeros) {
    const BlockLayout& layout = p.layout;
    int64_t number_bytes = layout.numbers[1] - layout.numbers[0];
    char* numbers = p.numbers + panel * p.num_blocks * PANEL * number_bytes;
    char* scales = p.scales + panel * p.num_blocks * PANEL * (layout.num_bytes - number_bytes);
    const char* rows[PANEL];
    for (int64_t row = 0; row < PANEL; row++) {
        int64_t index = panel * PANEL + row;
        rows[row] = index < p.num_rows ? p.rows[index] : nullptr;
    }
    for (int64_t block = 0; block < p.num_blocks; block++) {
        const char* at[PANEL];
        for (int64_t row = 0; row < PANEL; row++)
            at[row] = rows[row] ? rows[row] + block * layout.num_bytes : zeros;
        numbers = lay_out<4>(at, layout.numbers[0], layout.numbers[1], numbers);
        for (int32_t i = 0; i < layout.num_scales; i++) {
            const int32_t* part = layout.scales[i];
            scales = part[2] == 4   ? lay_out<4>(at, part[0], part[1], scales)
                     : part[2] == 2 ? lay_out<2>(at, part[0], part[1], scales)
                                    : lay_out<1>(at, part[0], part[1], scales);
        }
    }
}

void pack(const Worker& worker, void* argument, int32_t) {
    const Packing& p = *static_cast<Packing*>(argument);
    static const char zeros[MAX_BLOCK_BYTES] = {};
    int64_t panels = (p.num_rows + PANEL - 1) / PANEL;
    for (int64_t panel; (panel = worker.next(panels)) < panels;) pack_panel(p, panel, zeros);
}

}  // namespace

void quire_pack_blocks(const void* const* rows, int64_t num_rows, int64_t num_blocks,
                       const BlockLayout* layout, void* numbers, void* scales) {
    Packing all{(const char* const*)rows, num_rows,     num_blocks, *layout,
                (char*)numbers,           (char*)scales};
    run_on_all(pack, &all, 1);
}
