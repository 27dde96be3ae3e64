// test_grid_order.cpp: the places of mma_sm80's blocks (attention/common/tiles_mma_sm80.h), which multiplications give, against divisions.
#include <cstdint>
#include <cstdio>
#include <random>

#include "attention/common/tiles_mma_sm80.h"

namespace {

int failures = 0;

// The same by divisions.
fa::GridPlace divided(int tiles, int nheads, int batch, int64_t most, int block) {
    const int section = int(most < int64_t(nheads) * batch ? most : nheads * batch), first = block / (section * tiles) * section;
    const int index = block % (section * tiles), left = nheads * batch - first, heads = section < left ? section : left;
    const int head = first + index % heads;
    return {head / nheads, head % nheads, tiles - 1 - index / heads};
}

void check(int tiles, int nheads, int batch, int64_t section, int block) {
    const fa::GridPlace is = fa::grid_order(tiles, nheads, batch, section).place(block);
    const fa::GridPlace expected = divided(tiles, nheads, batch, section, block);
    if (is.b == expected.b && is.head == expected.head && is.query_tile == expected.query_tile) return;
    if (++failures <= 20)
        std::printf("tiles=%d nheads=%d batch=%d section=%lld block=%d: (%d, %d, %d), not (%d, %d, %d)\n", tiles, nheads, batch,
                    static_cast<long long>(section), block, is.b, is.head, is.query_tile, expected.b, expected.head, expected.query_tile);
}

}  // namespace

int main() {
    std::mt19937 random(2026);
    const auto up_to = [&](int64_t most) { return int64_t(random() % uint64_t(most)) + 1; };
    for (int call = 0; call < 2000; ++call) {  // every block of small grids
        const int tiles = int(up_to(9)), nheads = int(up_to(12)), batch = int(up_to(9));
        const int64_t section = up_to(nheads * batch + 4);
        for (int block = 0; block < tiles * nheads * batch; ++block) check(tiles, nheads, batch, section, block);
    }
    for (int call = 0; call < 200000; ++call) {  // some blocks of large ones
        const int tiles = int(up_to(INT32_MAX >> random() % 31)), nheads = int(up_to((INT32_MAX / tiles) >> random() % 8 | 1));
        const int64_t heads = INT32_MAX / tiles / nheads;
        const int batch = int(up_to(heads > 0 ? heads : 1));
        if (int64_t(tiles) * nheads * batch > INT32_MAX) continue;
        const int64_t blocks = int64_t(tiles) * nheads * batch, section = up_to(int64_t(nheads) * batch + 2);
        for (const int64_t block : {int64_t(0), blocks - 1, up_to(blocks) - 1, up_to(blocks) - 1})
            check(tiles, nheads, batch, section, int(block));
    }
    if (failures) std::printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
