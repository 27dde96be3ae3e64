// decode.cpp: merges results over disjoint sets of keys, one per rank, into the result over all keys. Decode computes a rank's result from
// its shard of the cache; merge receives it from the caller.
#include "distributed/call.h"

namespace fa::distributed {
namespace {

// This rank's result, out (batch, seqlen_q, heads, dim) and lse (batch, heads, seqlen_q), packed, in memory that other ranks read.
struct Part {
    char *out, *lse;
    int64_t rows, out_bytes, lse_bytes;
    Part(Walk& w, const Problem& p) {
        rows = p.a.batch * p.a.seqlen_q;
        out_bytes = rows * p.a.nheads * p.headdim_v * p.element, lse_bytes = rows * p.a.nheads * 4;
        out = w.shared(out_bytes), lse = w.shared(lse_bytes);
    }
};

// Fetches the parts of all ranks and merges them into p.a.out and p.a.lse.
fa_status merge_ranks(Walk& w, const Problem& p, const Part& part) {
    FA_RETURN_IF_ERROR(w.publish(kResult, part.out, part.out_bytes, part.out_bytes, 1));
    FA_RETURN_IF_ERROR(w.publish(kResultLse, part.lse, part.lse_bytes, part.lse_bytes, 1));
    FA_RETURN_IF_ERROR(w.begin());
    char *outs = w.scratch(p.size * part.out_bytes), *lses = w.scratch(p.size * part.lse_bytes);
    std::vector<Copy> copies;
    w.each_pair([&](int source, int target) {
        w.add(copies, source, target, kResult, 0, 0, outs + source * part.out_bytes, part.out_bytes, part.out_bytes, 1);
        w.add(copies, source, target, kResultLse, 0, 0, lses + source * part.lse_bytes, part.lse_bytes, part.lse_bytes, 1);
    });
    FA_RETURN_IF_ERROR(w.fetch(copies, kReady));
    if (w.runs())
        FA_RETURN_IF_ERROR(launch_merge_parts(p.rows(part.rows, p.a.nheads, p.headdim_v), view(p.a.out), p.a.lse, p.a.seqlen_q, outs,
                                              part.out_bytes / p.element, reinterpret_cast<const float*>(lses), part.lse_bytes / 4, p.size,
                                              w.stream()));
    return w.finish();
}

}  // namespace

fa_status decode(Walk& w, const Problem& p) {
    const Part part(w, p);
    fa_attention_args args = p.a;
    const int64_t row = p.a.nheads * p.headdim_v;
    args.out = {part.out, p.a.seqlen_q * row, row, p.headdim_v}, args.lse = reinterpret_cast<float*>(part.lse);
    if (p.rank != 0) args.sinks = nullptr;
    if (p.cache.seqlen_new == 0) args.causal = 0;  // all of this rank's keys come before the queries
    FA_RETURN_IF_ERROR(w.decode(args, p.cache));
    return merge_ranks(w, p, part);
}

fa_status merge(Walk& w, const Problem& p) {
    const Part part(w, p);
    if (w.runs()) {  // copies, because the results are overwritten while other ranks may still read them
        RowsShape floats = p.rows(p.a.nheads, 1, part.rows);
        floats.dtype = DType::kFloat32;
        const int64_t row = p.a.nheads * p.headdim_v;
        FA_RETURN_IF_ERROR(
            launch_sum(p.rows(part.rows, p.a.nheads, p.headdim_v), {part.out, row, p.headdim_v}, p.a.out.data, 0, 1, w.stream()));
        FA_RETURN_IF_ERROR(launch_sum(floats, {part.lse, part.rows, part.rows}, p.a.lse, 0, 1, w.stream()));
    }
    return merge_ranks(w, p, part);
}

}  // namespace fa::distributed
