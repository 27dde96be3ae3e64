// distributed.cpp: the exported functions of flash_attn_distributed.h. Each validates its arguments; group.cpp runs the call.
#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <new>

#include "api/common/options.h"
#include "api/common/regions.h"
#include "cpu/common/float_mode.h"
#include "distributed/group.h"

namespace fa::distributed {
namespace {

constexpr int kMostRanks = 1024;

fa_status check_rank(int32_t rank, int32_t size) {
    if (size < 1 || size > kMostRanks) return fail(FA_BAD_ARGUMENT, "size=%d is outside 1 .. %d", size, kMostRanks);
    if (rank < 0 || rank >= size) return fail(FA_BAD_ARGUMENT, "rank=%d is outside 0 .. size - 1 = %d", rank, size - 1);
    return FA_OK;
}
fa_status check_kind(int32_t kind) {
    if (kind >= FA_GROUP_THREADS && kind <= FA_GROUP_NCCL) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "kind=%d is not an fa_group_kind (1 .. 3)", kind);
}
fa_status check_layout(int32_t layout) {
    if (layout >= FA_LAYOUT_CONTIGUOUS && layout <= FA_LAYOUT_FLAT) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "layout=%d is not an fa_layout (1 .. 3)", layout);
}
fa_status read_lengths(const char* name, int32_t batch, const int32_t* cu, std::vector<int32_t>* lengths) {
    if (!cu) return fail(FA_BAD_ARGUMENT, "%s is NULL", name);
    if (cu[0] != 0) return fail(FA_BAD_ARGUMENT, "%s[0]=%d is not 0", name, cu[0]);
    for (int32_t b = 0; b < batch; ++b)
        if (cu[b + 1] < cu[b])
            return fail(FA_BAD_ARGUMENT, "%s[%d]=%d is below %s[%d]=%d: it must not decrease", name, b + 1, cu[b + 1], name, b, cu[b]);
    lengths->assign(cu, cu + batch + 1);
    return FA_OK;
}

// Rows that other ranks read must have adjacent heads, and must not overlap or run backwards.
fa_status check_rows(const char* name, const fa_tensor& t, int64_t heads, int64_t dim, int64_t rows) {
    if (rows == 0) return FA_OK;
    if (heads > 1 && t.head_stride != dim)
        return fail(FA_UNSUPPORTED, "%s.head_stride=%" PRId64 ": the heads of a row lie next to each other, %" PRId64 " elements apart",
                    name, t.head_stride, dim);
    if (rows > 1 && t.row_stride < heads * dim)
        return fail(FA_UNSUPPORTED, "%s.row_stride=%" PRId64 " is below the %" PRId64 " elements of a row", name, t.row_stride,
                    heads * dim);
    return FA_OK;
}

// The memory of the arrays. Other ranks read the inputs while results are written.
Region region_of(const Problem& p, const char* name, const fa_tensor& t, int64_t rows, bool queries, bool values) {
    return region(name, t, 1, rows, queries ? p.a.nheads : p.a.nheads_k, values ? p.headdim_v : int64_t(p.a.headdim), size_t(p.element));
}
Region lse_region(const Problem& p, const char* name, const float* lse) { return region(name, lse, p.a.nheads * p.rows_q(), 4); }
std::vector<Region> inputs_of(const Problem& p) {
    return {region_of(p, "q", p.a.q, p.rows_q(), true, false), region_of(p, "k", p.a.k, p.rows_k(), false, false),
            region_of(p, "v", p.a.v, p.rows_k(), false, true)};
}

// Chooses the first mode, in order of preference, that can serve the call. The modes differ in their transfers: gather moves keys and
// values; ulysses moves q, out and a rank's share of keys and values. With a window gather moves even less.
fa_status choose_mode(int32_t wanted, Problem* p, char* why_not, size_t size) {
    size_t used = 0;
    if (size) *why_not = 0;
    const auto serves = [&](int32_t mode) {
        char text[256] = "";
        const char* reason = mode_at(mode).refusal(*p, text, sizeof text);
        if (!*reason) return true;
        const int more = std::snprintf(why_not + used, size - used, "%s: %s\n", mode_at(mode).name, reason);
        used = std::min(size - 1, used + size_t(std::max(more, 0)));
        return false;
    };
    if (wanted != FA_MODE_AUTO) {
        p->mode = wanted;
        if (serves(wanted)) return FA_OK;
        if (used && why_not[used - 1] == '\n') why_not[used - 1] = 0;
        return fail(FA_UNSUPPORTED, "mode=%s", why_not);
    }
    const int64_t group = p->a.nheads / p->a.nheads_k;
    const bool even = p->a.nheads % p->size == 0 && (p->a.nheads_k % p->size == 0 || p->size % p->a.nheads_k == 0);
    const bool windowed = p->window.left >= 0;
    // All ranks must choose the same mode. A rank with a single row cannot tell whether a bias has rows, and on a rank without rows its
    // address may be NULL. Without keys it is NULL everywhere.
    const auto given = [](const fa_score_tensor& x) { return x.data || x.row_stride; };
    const bool scored = p->total_k() > 0 && (given(p->a.bias) || given(p->a.mask));
    const bool all_to_all = even && !windowed && !scored && (p->backward() || group <= p->size - 1 || p->layout != FA_LAYOUT_ZIGZAG);
    const int32_t order[] = {all_to_all ? FA_MODE_ULYSSES : FA_MODE_GATHER, all_to_all ? FA_MODE_GATHER : FA_MODE_ULYSSES};
    for (const int32_t mode : order) {
        p->mode = mode;
        if (serves(mode)) return FA_OK;
    }
    return fail(FA_UNSUPPORTED, "no mode serves the call:\n%s", why_not);
}

// Checks everything except the arrays of a backward call. `pointers` says whether data may be NULL.
fa_status validate(const fa_distributed_args* args, int32_t kind, int32_t rank, int32_t size, Operation operation, Pointers pointers,
                   Problem* p, char* why_not, size_t why_size) {
    fa_distributed_args d;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_distributed_args", sizeof(fa_distributed_args), &d));
    FA_RETURN_IF_ERROR(check_kind(kind));
    FA_RETURN_IF_ERROR(check_rank(rank, size));
    FA_RETURN_IF_ERROR(copy_args(d.attention, "fa_attention_args", sizeof(fa_attention_args), &p->a));
    fa_attention_args& a = p->a;
    a.struct_size = sizeof a;
    p->operation = operation, p->kind = kind, p->rank = rank, p->size = size, p->batch = d.batch, p->groups = d.groups;
    FA_RETURN_IF_ERROR(check_device(a.device));
    if (a.dtype < FA_FLOAT32 || a.dtype > FA_BFLOAT16)
        return fail(a.dtype == FA_FLOAT8_E4M3 ? FA_UNSUPPORTED : FA_BAD_ARGUMENT, "dtype=%s (%d) is none of float32, float16, bfloat16",
                    dtype_name(a.dtype), a.dtype);
    if (a.out_dtype && a.out_dtype != a.dtype)
        return fail(FA_UNSUPPORTED, "out_dtype=%s with dtype=%s: they are the same", dtype_name(a.out_dtype), dtype_name(a.dtype));
    if (a.max_score) return fail(FA_UNSUPPORTED, "max_score is set: a call over ranks does not give it");
    if (a.key_sums) return fail(FA_UNSUPPORTED, "key_sums is set: a call over ranks does not give it");
    FA_RETURN_IF_ERROR(refuse_options(a, Calls::kOverRanks));
    FA_RETURN_IF_ERROR(check_layout(d.layout));
    if (d.mode < FA_MODE_AUTO || d.mode > FA_MODE_ULYSSES) return fail(FA_BAD_ARGUMENT, "mode=%d is not an fa_mode (0 .. 2)", d.mode);
    if (d.groups < 0 || d.groups > kMostPieces) return fail(FA_BAD_ARGUMENT, "groups=%d is outside 0 .. %d", d.groups, kMostPieces);
    if (d.batch < 1 || d.batch > (1 << 24)) return fail(FA_BAD_ARGUMENT, "batch=%d is outside 1 .. 2^24", d.batch);
    if (a.nheads < 1) return fail(FA_BAD_ARGUMENT, "nheads=%d is below 1", a.nheads);
    if (a.nheads_k < 1) return fail(FA_BAD_ARGUMENT, "nheads_k=%d is below 1", a.nheads_k);
    if (a.nheads % a.nheads_k) return fail(FA_BAD_ARGUMENT, "nheads=%d is not a multiple of nheads_k=%d", a.nheads, a.nheads_k);
    if (a.headdim < 1 || a.headdim > 512) return fail(FA_BAD_ARGUMENT, "headdim=%d is outside 1 .. 512", a.headdim);
    if (a.headdim_v < 0 || a.headdim_v > 512) return fail(FA_BAD_ARGUMENT, "headdim_v=%d is outside 1 .. 512", a.headdim_v);
    if (a.headdim_v == 0) a.headdim_v = a.headdim;
    p->headdim_v = a.headdim_v, p->element = int64_t(dtype_size(a.dtype)), p->layout = fa_layout(d.layout);
    if (a.parts) return fail(FA_BAD_ARGUMENT, "parts is set: the ranks' parts follow from layout");
    FA_RETURN_IF_ERROR(read_lengths("cu_seqlens_q", d.batch, d.cu_seqlens_q, &p->cu_q));
    if (d.cu_seqlens_k) FA_RETURN_IF_ERROR(read_lengths("cu_seqlens_k", d.batch, d.cu_seqlens_k, &p->cu_k));
    else p->cu_k.insert(p->cu_k.end(), p->cu_q.begin(), p->cu_q.end());
    FA_RETURN_IF_ERROR(check_length("the tokens of cu_seqlens_q", p->total_q()));
    FA_RETURN_IF_ERROR(check_length("the tokens of cu_seqlens_k", p->total_k()));
    FA_RETURN_IF_ERROR(check_options(a));  // here, because a rank without queries makes no launch that would check them
    const auto edge = [](int64_t window) { return std::min<int64_t>(window, INT32_MAX); };
    p->window = {a.top_left != 0, a.has_window ? edge(a.window_left) : -1, a.causal ? 0 : a.has_window ? edge(a.window_right) : -1};
    for (int r = 0; r < size; ++r) {
        p->q.push_back(segments_of(p->layout, r, size, p->cu_q));
        p->k.push_back(segments_of(p->layout, r, size, p->cu_k));
    }
    const int64_t rows_q = p->rows_q(), rows_k = p->rows_k();
    if (a.total_q != rows_q)
        return fail(FA_BAD_ARGUMENT,
                    "attention->total_q=%" PRId64 ", but rank %d of %d holds %" PRId64 " of the %" PRId64 " tokens of cu_seqlens_q",
                    a.total_q, rank, size, rows_q, p->total_q());
    if (a.total_k != rows_k)
        return fail(FA_BAD_ARGUMENT,
                    "attention->total_k=%" PRId64 ", but rank %d of %d holds %" PRId64 " of the %" PRId64 " tokens of cu_seqlens_k",
                    a.total_k, rank, size, rows_k, p->total_k());
    const bool need = pointers == Pointers::kRequired;
    const auto element = size_t(p->element);
    FA_RETURN_IF_ERROR(check_pointer("q", a.q.data, element, need && rows_q > 0));
    FA_RETURN_IF_ERROR(check_pointer("k", a.k.data, element, need && rows_k > 0));
    FA_RETURN_IF_ERROR(check_pointer("v", a.v.data, element, need && rows_k > 0));
    FA_RETURN_IF_ERROR(check_pointer("out", a.out.data, element, need && rows_q > 0));
    FA_RETURN_IF_ERROR(check_pointer("lse", a.lse, 4, need && rows_q > 0 && operation == Operation::kBackward));
    FA_RETURN_IF_ERROR(check_rows("q", a.q, a.nheads, a.headdim, rows_q));
    FA_RETURN_IF_ERROR(check_rows("k", a.k, a.nheads_k, a.headdim, rows_k));
    FA_RETURN_IF_ERROR(check_rows("v", a.v, a.nheads_k, p->headdim_v, rows_k));
    FA_RETURN_IF_ERROR(check_rows("out", a.out, a.nheads, p->headdim_v, rows_q));
    if (operation == Operation::kForward) {
        const Region out = region_of(*p, "out", a.out, rows_q, true, true), lse = lse_region(*p, "lse", need ? a.lse : nullptr);
        for (const Region& input : inputs_of(*p)) {
            FA_RETURN_IF_ERROR(check_apart(out, input));
            FA_RETURN_IF_ERROR(check_apart(lse, input));
        }
        FA_RETURN_IF_ERROR(check_apart(out, lse));
    }
    return choose_mode(d.mode, p, why_not, why_size);
}

fa_status validate(const fa_distributed_backward_args* args, int32_t kind, int32_t rank, int32_t size, Pointers pointers, Problem* p,
                   char* why_not, size_t why_size) {
    fa_distributed_backward_args b;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_distributed_backward_args", sizeof(fa_distributed_backward_args), &b));
    FA_RETURN_IF_ERROR(copy_args(b.gradients, "fa_attention_backward_args", sizeof(fa_attention_backward_args), &p->g));
    p->wants_dbias = p->g.dbias.data != nullptr;
    FA_RETURN_IF_ERROR(validate(b.forward, kind, rank, size, Operation::kBackward, pointers, p, why_not, why_size));
    const fa_attention_backward_args& g = p->g;
    if (g.accumulate) return fail(FA_UNSUPPORTED, "accumulate=%d: a distributed call takes 0", g.accumulate);
    if (g.dbias.data && !p->a.bias.data)
        return fail(FA_BAD_ARGUMENT, "dbias.data=%p is set, but bias.data is NULL", static_cast<void*>(g.dbias.data));
    if (g.dsinks && !p->a.sinks) return fail(FA_BAD_ARGUMENT, "dsinks=%p is set, but sinks is NULL", static_cast<void*>(g.dsinks));
    const bool need = pointers == Pointers::kRequired;
    const auto element = size_t(p->element);
    const int64_t rows_q = p->rows_q(), rows_k = p->rows_k();
    FA_RETURN_IF_ERROR(check_pointer("dout", g.dout.data, element, need && rows_q > 0));
    FA_RETURN_IF_ERROR(check_pointer("dq", g.dq.data, element, need && rows_q > 0));
    FA_RETURN_IF_ERROR(check_pointer("dk", g.dk.data, element, need && rows_k > 0));
    FA_RETURN_IF_ERROR(check_pointer("dv", g.dv.data, element, need && rows_k > 0));
    FA_RETURN_IF_ERROR(check_pointer("dlse", g.dlse, 4, false));
    FA_RETURN_IF_ERROR(check_pointer("dsinks", g.dsinks, 4, false));
    FA_RETURN_IF_ERROR(check_rows("dout", g.dout, p->a.nheads, p->headdim_v, rows_q));
    FA_RETURN_IF_ERROR(check_rows("dq", g.dq, p->a.nheads, p->a.headdim, rows_q));
    FA_RETURN_IF_ERROR(check_rows("dk", g.dk, p->a.nheads_k, p->a.headdim, rows_k));
    FA_RETURN_IF_ERROR(check_rows("dv", g.dv, p->a.nheads_k, p->headdim_v, rows_k));
    std::vector<Region> others = inputs_of(*p);
    others.push_back(region_of(*p, "out", p->a.out, rows_q, true, true));
    others.push_back(region_of(*p, "dout", g.dout, rows_q, true, true));
    others.push_back(lse_region(*p, "lse", p->a.lse));
    others.push_back(lse_region(*p, "dlse", g.dlse));
    for (const Region& gradient : {region_of(*p, "dq", g.dq, rows_q, true, false), region_of(*p, "dk", g.dk, rows_k, false, false),
                                   region_of(*p, "dv", g.dv, rows_k, false, true), region("dsinks", g.dsinks, p->a.nheads, 4)}) {
        for (const Region& other : others) FA_RETURN_IF_ERROR(check_apart(gradient, other));
        others.push_back(gradient);
    }
    return FA_OK;
}

// The results of decode. fa_kvcache_attention, which checks all else, writes to memory of the group instead.
fa_status check_results(const fa_kvcache_args& c, const fa_attention_args& a, size_t element) {
    FA_RETURN_IF_ERROR(check_length("seqlen_k", a.seqlen_k));
    const auto cached = [&](const char* name, const fa_tensor& t, int32_t columns) {
        return region(name, t, std::max(c.cache_batch, 0), c.page_size > 0 ? c.page_size : a.seqlen_k, std::max(a.nheads_k, 0), columns,
                      dtype_size(c.cache_dtype ? c.cache_dtype : a.dtype));
    };
    const Region out = region("out", a.out, a.batch, a.seqlen_q, a.nheads, a.headdim_v, element);
    const Region lse = region("lse", a.lse, int64_t(a.batch) * a.nheads * a.seqlen_q, 4);
    const Region inputs[] = {region("q", a.q, a.batch, a.seqlen_q, a.nheads, a.headdim, element), cached("k", a.k, a.headdim),
                             cached("v", a.v, a.headdim_v)};
    FA_RETURN_IF_ERROR(check_output(out));
    for (const Region& input : inputs) {
        FA_RETURN_IF_ERROR(check_apart(out, input));
        FA_RETURN_IF_ERROR(check_apart(lse, input));
    }
    return check_apart(lse, out);
}

fa_status validate(const fa_distributed_decode_args* args, int32_t kind, int32_t rank, int32_t size, Problem* p) {
    fa_distributed_decode_args d;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_distributed_decode_args", sizeof(fa_distributed_decode_args), &d));
    FA_RETURN_IF_ERROR(check_kind(kind));
    FA_RETURN_IF_ERROR(check_rank(rank, size));
    FA_RETURN_IF_ERROR(copy_args(d.cache, "fa_kvcache_args", offsetof(fa_kvcache_args, shared_prefix), &p->cache));
    FA_RETURN_IF_ERROR(copy_args(p->cache.attention, "fa_attention_args", sizeof(fa_attention_args), &p->a));
    fa_attention_args& a = p->a;
    a.struct_size = sizeof a, p->cache.struct_size = sizeof p->cache;
    p->operation = Operation::kDecode, p->kind = kind, p->rank = rank, p->size = size, p->batch = a.batch;
    FA_RETURN_IF_ERROR(check_device(a.device));
    if (a.dtype < FA_FLOAT32 || a.dtype > FA_BFLOAT16)
        return fail(FA_BAD_ARGUMENT, "dtype=%s (%d) is none of float32, float16, bfloat16", dtype_name(a.dtype), a.dtype);
    if (a.batch < 1 || a.seqlen_q < 1 || a.nheads < 1 || a.headdim < 1)
        return fail(FA_BAD_ARGUMENT, "batch=%d, seqlen_q=%" PRId64 ", nheads=%d, headdim=%d: each is at least 1", a.batch, a.seqlen_q,
                    a.nheads, a.headdim);
    FA_RETURN_IF_ERROR(check_length("seqlen_q", a.seqlen_q));
    FA_RETURN_IF_ERROR(check_total(a.batch, "nheads", a.nheads, "seqlen_q", a.seqlen_q));
    if (a.headdim_v == 0) a.headdim_v = a.headdim;
    p->headdim_v = a.headdim_v, p->element = int64_t(dtype_size(a.dtype));
    FA_RETURN_IF_ERROR(refuse_options(a, Calls::kOverShards));
    const char* needs = a.has_window && (a.window_left >= 0 || (!a.causal && a.window_right >= 0)) ? "window_size"
                        : p->cache.rotary_cos                                                      ? "rotary_cos"
                        : p->cache.cache_leftpad                                                   ? "cache_leftpad"
                        : a.top_left && a.causal                                                   ? "top_left"
                                                                                                   : nullptr;
    if (needs)
        return fail(FA_UNSUPPORTED, "%s is set: it needs positions in the whole sequence, which a rank's shard of the cache does not have",
                    needs);
    FA_RETURN_IF_ERROR(check_pointer("out", a.out.data, size_t(p->element), true));
    return check_results(p->cache, a, size_t(p->element));
}

fa_status validate(const fa_distributed_merge_args* args, int32_t kind, int32_t rank, int32_t size, Pointers pointers, Problem* p) {
    fa_distributed_merge_args m;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_distributed_merge_args", sizeof(fa_distributed_merge_args), &m));
    FA_RETURN_IF_ERROR(check_kind(kind));
    FA_RETURN_IF_ERROR(check_rank(rank, size));
    FA_RETURN_IF_ERROR(check_device(m.device));
    if (m.dtype < FA_FLOAT32 || m.dtype > FA_BFLOAT16)
        return fail(FA_BAD_ARGUMENT, "dtype=%s (%d) is none of float32, float16, bfloat16", dtype_name(m.dtype), m.dtype);
    if (m.nheads < 1 || m.headdim_v < 1 || m.rows < 1)
        return fail(FA_BAD_ARGUMENT, "rows=%" PRId64 ", nheads=%d, headdim_v=%d: each is at least 1", m.rows, m.nheads, m.headdim_v);
    FA_RETURN_IF_ERROR(check_total(1, "nheads", m.nheads, "rows", m.rows));
    fa_attention_args& a = p->a;
    a = {};
    a.struct_size = sizeof a, a.device = m.device, a.dtype = m.dtype, a.batch = 1, a.nheads = m.nheads, a.nheads_k = 1;
    a.headdim = a.headdim_v = m.headdim_v, a.seqlen_q = m.rows, a.out = m.out, a.lse = m.lse;
    a.workspace = m.workspace, a.workspace_bytes = m.workspace_bytes;
    p->operation = Operation::kMerge, p->kind = kind, p->rank = rank, p->size = size, p->batch = 1;
    p->headdim_v = m.headdim_v, p->element = int64_t(dtype_size(m.dtype));
    FA_RETURN_IF_ERROR(check_rows("out", m.out, m.nheads, m.headdim_v, m.rows));
    if (const int64_t row = int64_t(m.nheads) * m.headdim_v; m.rows > 1 && m.out.row_stride != row)
        return fail(FA_UNSUPPORTED, "out.row_stride=%" PRId64 ": rows lie next to each other, %" PRId64 " elements apart", m.out.row_stride,
                    row);
    FA_RETURN_IF_ERROR(check_pointer("out", m.out.data, size_t(p->element), pointers == Pointers::kRequired));
    FA_RETURN_IF_ERROR(check_pointer("lse", m.lse, 4, pointers == Pointers::kRequired));
    return FA_OK;
}

// Fills the plan of a checked call.
fa_status plan_of(Problem& p, fa_status status, fa_distributed_plan* plan) {
    plan->status = status;
    if (status != FA_OK) return status;
    Needs own;
    plan->status = count(p, &own);
    if (plan->status != FA_OK) return fa_status(plan->status);
    plan->mode = p.operation == Operation::kForward || p.backward() ? p.mode : 0;
    plan->calls = own.calls, plan->workspace_bytes = own.workspace, plan->received_bytes = own.received;
    if (!p.cu_q.empty()) plan->rows_q = p.rows_q(), plan->rows_k = p.rows_k();
    plan->shared_bytes = own.shared + own.transfer;
    const int32_t rank = p.rank;
    for (p.rank = 0; p.rank < p.size && !p.cu_q.empty(); ++p.rank) {
        Needs needs;
        if (p.rank == rank) continue;
        if (const fa_status counted = count(p, &needs, false); counted != FA_OK) return fa_status(plan->status = counted);
        plan->shared_bytes = std::max(plan->shared_bytes, needs.shared + needs.transfer);
    }
    p.rank = rank;
    return FA_OK;
}

fa_status check_plan(fa_distributed_plan* plan) {
    if (!plan || plan->struct_size != sizeof(fa_distributed_plan))
        return fail(FA_BAD_ARGUMENT, "plan is NULL or plan.struct_size is not sizeof(fa_distributed_plan) = %zu",
                    sizeof(fa_distributed_plan));
    std::memset(plan, 0, sizeof *plan);
    plan->struct_size = sizeof *plan;
    return FA_OK;
}

fa_status check_group(const fa_group* group, int32_t device) {
    if (group->args.device == device) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "device=%d, but the group's is %d", device, group->args.device);
}

// Lack of host memory throws an exception, which must not cross the C ABI.
template <typename Body>
fa_status guarded(const Body& body) {
    const cpu::FloatMode mode;
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return fail(FA_OUT_OF_MEMORY, "no host memory left");
    }
}

// For collective functions, where other ranks may already be waiting.
template <typename Body>
fa_status together(fa_group* group, const Body& body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        group->meeting->abort("a rank has no host memory left");
        return fail(FA_OUT_OF_MEMORY, "no host memory left");
    }
}

// A collective call: a rank with invalid arguments tells the others.
template <typename Validate>
fa_status collective(fa_group* group, void* stream, const Validate& validate) {
    if (!group) return fail(FA_BAD_ARGUMENT, "group is NULL");
    const cpu::FloatMode mode;
    return together(group, [&] {
        Problem p{};
        p.rank = group->args.rank, p.size = group->args.size, p.kind = group->args.kind;
        fa_status status = validate(&p);
        if (status == FA_OK) status = check_group(group, p.a.device);
        // Determined once, so that counting and launching use the same number.
        if (status == FA_OK && p.a.device == FA_CPU) {
            int32_t threads;
            status = find_threads(p.a.device, p.a.num_threads, &threads);
            if (status == FA_OK) p.a.num_threads = threads;
        }
        return run(group, p, status, stream);
    });
}

}  // namespace
}  // namespace fa::distributed

using fa::fail;
using fa::Pointers;
using fa::distributed::Operation;
using fa::distributed::Problem;

extern "C" {

fa_status fa_group_create(const fa_group_args* args, fa_group** group) {
    if (!group) return fail(FA_BAD_ARGUMENT, "group is NULL");
    *group = nullptr;
    fa_group_args a;
    FA_RETURN_IF_ERROR(fa::copy_args(args, "fa_group_args", sizeof(fa_group_args), &a));
    FA_RETURN_IF_ERROR(fa::distributed::check_kind(a.kind));
    FA_RETURN_IF_ERROR(fa::distributed::check_rank(a.rank, a.size));
    FA_RETURN_IF_ERROR(fa::check_device(a.device));
    if (a.reserved) return fail(FA_BAD_ARGUMENT, "reserved=%d must be 0", a.reserved);
    if (a.timeout_ms < 0) return fail(FA_BAD_ARGUMENT, "timeout_ms=%" PRId64 " is negative", a.timeout_ms);
    if (a.timeout_ms == 0) a.timeout_ms = 30000;
    if (!a.all_gather) return fail(FA_BAD_ARGUMENT, "all_gather is NULL: the ranks find each other through it");
    const bool nccl = a.kind == FA_GROUP_NCCL;
    if (nccl != (a.nccl_comm != nullptr))
        return fail(FA_BAD_ARGUMENT,
                    nccl ? "nccl_comm is NULL with kind=FA_GROUP_NCCL" : "nccl_comm is set, but kind is not FA_GROUP_NCCL");
    if (nccl && a.device != FA_CUDA) return fail(FA_BAD_ARGUMENT, "kind=FA_GROUP_NCCL with device=FA_CPU: NCCL is for GPUs");
    return fa::distributed::guarded([&]() -> fa_status {
        std::unique_ptr<fa_group> made(new fa_group);
        made->args = a;
        made->args.nccl_library = nullptr;
        if (nccl) made->meeting = fa::distributed::meet_by_callback(a);
        else FA_RETURN_IF_ERROR(fa::distributed::meet_on_board(a, &made->meeting));
        if (a.device == FA_CPU) {
            FA_RETURN_IF_ERROR(fa::distributed::make_host_transport(a, *made->meeting, &made->transport));
        } else {
#if FA_WITH_CUDA
            FA_RETURN_IF_ERROR(nccl ? fa::distributed::make_nccl_transport(a, *made->meeting, &made->transport)
                                    : fa::distributed::make_cuda_transport(a, *made->meeting, &made->transport));
#else
            return fail(FA_UNSUPPORTED, "device=FA_CUDA: this build has the CPU backend only");
#endif
        }
        *group = made.release();
        return FA_OK;
    });
}

void fa_group_destroy(fa_group* group) {
    if (!group) return;
    group->transport->drain();
    // Memory must not be freed while another rank still reads it.
    if (group->meeting->check() == FA_OK) group->transport->fence();
    else group->meeting->wait_for_readers();
    delete group;
}

fa_status fa_group_reserve(fa_group* group, size_t bytes) {
    if (!group) return fail(FA_BAD_ARGUMENT, "group is NULL");
    return fa::distributed::together(group, [&] { return fa::distributed::reserve(group, bytes); });
}

fa_status fa_group_refuse(fa_group* group, fa_status status, const char* reason) {
    if (!group) return fail(FA_BAD_ARGUMENT, "group is NULL");
    if (status <= FA_OK || status > FA_RANK_LOST || status == FA_WORKSPACE_TOO_SMALL) status = FA_BAD_ARGUMENT;
    if (!reason || !*reason) reason = "fa_group_refuse was called";
    return fa::distributed::together(group, [&] {
        Problem p{};
        p.rank = group->args.rank, p.size = group->args.size;
        return fa::distributed::run(group, p, fail(status, "%s", reason), nullptr);
    });
}

void fa_group_abort(fa_group* group, const char* reason) {
    if (group) group->meeting->abort(reason && *reason ? reason : "fa_group_abort was called");
}

fa_status fa_distributed_segments(int32_t layout, int32_t rank, int32_t size, int32_t batch, const int32_t* cu_seqlens,
                                  fa_segment* segments, int64_t capacity, int64_t* count) {
    FA_RETURN_IF_ERROR(fa::distributed::check_layout(layout));
    FA_RETURN_IF_ERROR(fa::distributed::check_rank(rank, size));
    if (batch < 0) return fail(FA_BAD_ARGUMENT, "batch=%d is negative", batch);
    if (!count) return fail(FA_BAD_ARGUMENT, "count is NULL");
    if (!segments && capacity > 0) return fail(FA_BAD_ARGUMENT, "segments is NULL with capacity=%" PRId64, capacity);
    return fa::distributed::guarded([&]() -> fa_status {
        std::vector<int32_t> lengths;
        FA_RETURN_IF_ERROR(fa::distributed::read_lengths("cu_seqlens", batch, cu_seqlens, &lengths));
        const auto found = fa::distributed::segments_of(fa_layout(layout), rank, size, lengths);
        *count = int64_t(found.size());
        for (int64_t i = 0; i < std::min<int64_t>(capacity, *count); ++i)
            segments[i] = {found[size_t(i)].sequence, found[size_t(i)].begin, found[size_t(i)].end};
        return FA_OK;
    });
}

fa_status fa_distributed_query(const fa_distributed_args* args, int32_t kind, int32_t rank, int32_t size, fa_distributed_plan* plan) {
    FA_RETURN_IF_ERROR(fa::distributed::check_plan(plan));
    return fa::distributed::guarded([&] {
        Problem p{};
        const fa_status status = fa::distributed::validate(args, kind, rank, size, Operation::kForward, Pointers::kOptional, &p,
                                                           plan->why_not, sizeof plan->why_not);
        return fa::distributed::plan_of(p, status, plan);
    });
}

fa_status fa_distributed_backward_query(const fa_distributed_backward_args* args, int32_t kind, int32_t rank, int32_t size,
                                        fa_distributed_plan* plan) {
    FA_RETURN_IF_ERROR(fa::distributed::check_plan(plan));
    return fa::distributed::guarded([&] {
        Problem p{};
        const fa_status status =
            fa::distributed::validate(args, kind, rank, size, Pointers::kOptional, &p, plan->why_not, sizeof plan->why_not);
        return fa::distributed::plan_of(p, status, plan);
    });
}

fa_status fa_distributed_decode_query(const fa_distributed_decode_args* args, int32_t kind, int32_t rank, int32_t size,
                                      fa_distributed_plan* plan) {
    FA_RETURN_IF_ERROR(fa::distributed::check_plan(plan));
    return fa::distributed::guarded([&] {
        Problem p{};
        return fa::distributed::plan_of(p, fa::distributed::validate(args, kind, rank, size, &p), plan);
    });
}

fa_status fa_distributed_merge_query(const fa_distributed_merge_args* args, int32_t kind, int32_t rank, int32_t size,
                                     fa_distributed_plan* plan) {
    FA_RETURN_IF_ERROR(fa::distributed::check_plan(plan));
    return fa::distributed::guarded([&] {
        Problem p{};
        return fa::distributed::plan_of(p, fa::distributed::validate(args, kind, rank, size, Pointers::kOptional, &p), plan);
    });
}

fa_status fa_distributed_forward(fa_group* group, const fa_distributed_args* args, void* stream) {
    char why[1472];
    return fa::distributed::collective(group, stream, [&](Problem* p) {
        return fa::distributed::validate(args, p->kind, p->rank, p->size, Operation::kForward, Pointers::kRequired, p, why, sizeof why);
    });
}

fa_status fa_distributed_backward(fa_group* group, const fa_distributed_backward_args* args, void* stream) {
    char why[1472];
    return fa::distributed::collective(group, stream, [&](Problem* p) {
        return fa::distributed::validate(args, p->kind, p->rank, p->size, Pointers::kRequired, p, why, sizeof why);
    });
}

fa_status fa_distributed_decode(fa_group* group, const fa_distributed_decode_args* args, void* stream) {
    return fa::distributed::collective(group, stream,
                                       [&](Problem* p) { return fa::distributed::validate(args, p->kind, p->rank, p->size, p); });
}

fa_status fa_distributed_merge(fa_group* group, const fa_distributed_merge_args* args, void* stream) {
    return fa::distributed::collective(
        group, stream, [&](Problem* p) { return fa::distributed::validate(args, p->kind, p->rank, p->size, Pointers::kRequired, p); });
}

}  // extern "C"
