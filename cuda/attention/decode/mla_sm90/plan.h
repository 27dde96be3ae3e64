// mla_sm90/plan.h: the tiles of decode_mla_sm90, and the number of shares into which it divides the keys of a sequence.
#pragma once

#include <cstdint>

#include "attention/common/params.h"

namespace fa {

// Whether V is the first columns of K, in the same memory. If not, V is loaded, too, and a tile has half the keys.
inline bool mla_v_is_k(const AttentionParams& p) {
    return p.v.data == p.k.data && p.v.batch == p.k.batch && p.v.row == p.k.row && p.v.head == p.k.head;
}
FA_HOST_DEVICE constexpr int mla_keys(bool own_v) { return own_v ? 32 : 64; }  // keys of a tile

constexpr int kMlaMostSplits = 128, kMlaInvariantTiles = 32;  // most shares; batch_invariant: tiles per share

// batch_invariant: a sequence has one share per kMlaInvariantTiles of its own tiles, whatever the capacity of the cache.
inline bool mla_is_invariant(const AttentionParams& p) { return p.cache.batch_invariant && p.cache.num_splits == 0; }
FA_HOST_DEVICE constexpr int mla_invariant_share(int tiles) {
    const int least = (tiles + kMlaMostSplits - 1) / kMlaMostSplits;
    return least > kMlaInvariantTiles ? least : kMlaInvariantTiles;
}

// The number of shares into which the keys of every sequence are divided. It minimises the time of the whole grid, with one block per
// multiprocessor, in units of tiles of `keys` keys. A block costs a few tiles more than its share has. The host knows only the capacity of
// the cache and uses it as the length.
inline int mla_splits(const AttentionParams& p, int keys, int64_t blocks_per_sequence, int multiprocessors) {
    constexpr int kBlockCost = 6;
    const int64_t tiles = (int64_t(p.seqlen_k) + keys - 1) / keys, most = tiles < kMlaMostSplits ? tiles : kMlaMostSplits;
    if (p.cache.num_splits > 0) return p.cache.num_splits;
    if (most <= 1) return 1;
    if (mla_is_invariant(p)) {  // room for the shares of every length
        const int64_t shares = (tiles + kMlaInvariantTiles - 1) / kMlaInvariantTiles;
        return int(shares < kMlaMostSplits ? shares : kMlaMostSplits);
    }
    int64_t best = 1, best_cost = -1;
    for (int64_t splits = 1; splits <= most; ++splits) {
        const int64_t waves = (p.batch * blocks_per_sequence * splits + multiprocessors - 1) / multiprocessors;
        const int64_t cost = waves * ((tiles + splits - 1) / splits + kBlockCost);
        if (best_cost < 0 || cost < best_cost) best = splits, best_cost = cost;
    }
    return int(best);
}

}  // namespace fa
