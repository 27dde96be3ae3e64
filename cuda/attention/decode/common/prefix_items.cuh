// prefix_items.cuh: the items of a prefix pass on the device: the group of an item, and the places of its rows in q.
#pragma once

#include "attention/decode/common/schedule.h"
#include "device/ptx.cuh"

namespace fa {

// The group that has an item. Called by whole warps, whose lanes read 32 groups at a time. Groups are in the order of their items; where
// there is none, what is read is not used.
__device__ __forceinline__ PrefixGroup group_of_item(const PrefixPlan& plan, int batch, int item) {
    constexpr int kWords = sizeof(PrefixGroup) / sizeof(int4);
    static_assert(sizeof(PrefixGroup) == kWords * sizeof(int4));
    union {
        int4 words[kWords];
        PrefixGroup group;
    } own{}, found{};
    const int count = plan.counts[0];
#pragma unroll 1
    for (int first = 0;; first += 32) {
        const int g = first + int(threadIdx.x % 32);
        if (g < batch / 2)  // not `count`, so as not to wait for it
#pragma unroll
            for (int x = 0; x < kWords; ++x) own.words[x] = reinterpret_cast<const int4*>(plan.groups + g)[x];
        const unsigned before = __ballot_sync(~0u, g < count && own.group.first_item <= item);
        if (before)
#pragma unroll
            for (int x = 0; x < kWords; ++x) {
                const int from = 31 - __clz(int(before));
                found.words[x] = make_int4(__shfl_sync(~0u, own.words[x].x, from), __shfl_sync(~0u, own.words[x].y, from),
                                           __shfl_sync(~0u, own.words[x].z, from), __shfl_sync(~0u, own.words[x].w, from));
            }
        if (before != ~0u) return found.group;
    }
}

// Where row `row` of a group's matrix for one key head lies in q: an offset in elements, below 0 for a row that no member has.
__device__ __forceinline__ int64_t prefix_row(const DecodeParams& d, const PrefixGroup& group, int head_k, int row,
                                              const Divisor& of_sequence) {
    const AttentionParams& p = d.attention;
    const int member = of_sequence.divide(row);
    if (member >= group.members) return -1;
    const int r = of_sequence.remainder(row, member), i = d.group.divide(r);
    const int head = head_k * p.group + d.group.remainder(r, i);
    return d.prefix.order[group.begin + member] * p.q.batch + i * p.q.row + head * p.q.head;
}

}  // namespace fa
