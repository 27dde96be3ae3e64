// prefix_items.cuh: the items of a prefix pass on the device: the group of an item, and the places of its rows in q.
#pragma once

#include "attention/decode/common/schedule.h"
#include "device/ptx.cuh"

namespace fa {

// The group that has an item. Called by whole warps, whose lanes look at 32 groups at a time.
__device__ __forceinline__ PrefixGroup group_of_item(const PrefixPlan& plan, int item) {
    const int count = plan.counts[0];
    int last = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += 32) {
        const int g = first + int(threadIdx.x % 32);
        const unsigned before = __ballot_sync(~0u, g < count && plan.groups[g].first_item <= item);
        if (before) last = first + 31 - __clz(int(before));
        if (before != ~0u) break;  // groups are in the order of their items
    }
    return plan.groups[last];
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
