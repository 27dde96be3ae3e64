// lanes/params.h: the parameters of lanes/kernel.cuh and cluster_sm90/kernel.cuh: only what these kernels read, in the order in which they
// read it. Parameters come through a cache that starts cold, and every 64 bytes are another trip to memory.
#pragma once

#include "attention/decode/common/decode.h"

namespace fa {

struct LaneParams {
    // Where the keys are.
    const int32_t* seqlens;  // from here to `added` as in CacheView
    const int32_t* batch_idx;
    const int32_t* block_table;
    int64_t table_row;
    int32_t entries, added;
    int32_t seqlen_k, seqlen_q;
    int32_t window_left, window_right;
    bool top_left, appends;  // appends: the kernel itself appends the one new key
    int32_t headdim, headdim_v;
    int32_t cluster_log, key_warps_log;  // log2 of: blocks of a cluster; warps of a block that divide its keys
    int32_t tile_rows, rows;             // rows of q: of a block; of a key head
    Divisor units, page, group;          // as in DecodeParams
    TensorView k, v;
    // Where q is, and the key and value that join the cache.
    TensorView q;
    float scale_log2, softcap_log2;       // as in DecodeParams
    const void *rotary_cos, *rotary_sin;  // from here to rotary_interleaved as in AppendParams; nullptr = off
    int32_t rotary_rows, rotary_dim;
    bool rotary_interleaved, rotary_float32;
    const void *k_new, *v_new;
    int64_t k_new_batch, k_new_head, v_new_batch, v_new_head;
    CacheScale k_scale, v_scale;  // of 8-bit elements; in lanes/kernel.cuh both lie in one line of 64 bytes
    // Where the result goes.
    TensorView out;
    float* lse;
    const float *sinks, *alibi_slopes;
    int64_t alibi_batch;
    int32_t nheads;
};

inline LaneParams lane_params(const DecodeParams& d, const AppendParams* append) {
    const AttentionParams& p = d.attention;
    const CacheView& c = p.cache;
    const auto log_of = [](int x) {
        int log = 0;
        while (x >> (log + 1)) ++log;
        return log;
    };
    LaneParams l{};
    l.seqlens = c.seqlens, l.batch_idx = c.batch_idx, l.block_table = c.block_table, l.table_row = c.table_row;
    l.entries = c.entries, l.added = c.added, l.seqlen_k = p.seqlen_k, l.seqlen_q = p.seqlen_q;
    l.window_left = p.window_left, l.window_right = p.window_right, l.top_left = p.top_left;
    l.headdim = p.headdim, l.headdim_v = p.headdim_v, l.nheads = p.nheads;
    l.cluster_log = log_of(d.shape.cluster), l.key_warps_log = log_of(kLaneWarps / (d.shape.row_warps ? d.shape.row_warps : 1));
    l.tile_rows = d.shape.rows, l.rows = p.seqlen_q * p.group;
    l.units = d.units, l.page = d.page, l.group = d.group;
    l.k = p.k, l.v = p.v, l.q = p.q, l.out = p.out;
    l.scale_log2 = d.scale_log2, l.softcap_log2 = d.softcap_log2;
    if (append) {
        const AppendParams& a = *append;
        l.appends = true;
        l.k_new = a.k_new.data, l.k_new_batch = a.k_new.batch, l.k_new_head = a.k_new.head;
        l.v_new = a.v_new.data, l.v_new_batch = a.v_new.batch, l.v_new_head = a.v_new.head;
        l.rotary_cos = a.rotary_cos, l.rotary_sin = a.rotary_sin, l.rotary_rows = a.rotary_rows, l.rotary_dim = a.rotary_dim;
        l.rotary_interleaved = a.rotary_interleaved, l.rotary_float32 = a.rotary_dtype == DType::kFloat32;
    }
    l.k_scale = c.k_scale, l.v_scale = c.v_scale;
    l.lse = p.lse, l.sinks = p.sinks, l.alibi_slopes = p.alibi_slopes, l.alibi_batch = p.alibi_batch;
    return l;
}

}  // namespace fa
