#include "distributed/call.h"

#include <algorithm>
#include <cstring>

namespace fa::distributed {
namespace {

// Fake addresses for memory that is only counted: beyond the addresses of any process, and never passed to a launch.
constexpr uintptr_t kCountedScratch = uintptr_t(1) << 61, kCountedShared = uintptr_t(1) << 62;
constexpr int64_t kAlign = 256;

template <typename T>
void hide_counted(T*& pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) >= kCountedScratch) pointer = nullptr;
}

}  // namespace

int64_t Problem::longest(const std::vector<int32_t>& cu) {
    int64_t most = 0;
    for (size_t b = 1; b < cu.size(); ++b) most = std::max(most, int64_t(cu[b]) - cu[b - 1]);
    return most;
}

RowsShape Problem::rows(int64_t count, int32_t heads, int64_t dim) const {
    return {DType(a.dtype), count, heads, int32_t(dim), device(), a.num_threads ? a.num_threads : default_threads()};
}

void Parts::add(const Problem& p, const Segment& segment, Interval keys, int64_t key_row) {
    const int32_t b = segment.sequence;
    const int64_t count = std::max<int64_t>(keys.end - keys.begin, 0), shift = p.window.shift(p.seqlen_q(b), p.seqlen_k(b));
    fa_part made{};
    made.key_begin = int32_t(key_row), made.seqlen_k = int32_t(count), made.seqlen_q = int32_t(segment.length());
    made.shift = int32_t(segment.begin + shift - keys.begin);
    made.first_row = segment.begin, made.first_key = int32_t(keys.begin), made.sequence = b;
    // The rank's rows of the sequence begin with those of its first segment there.
    int64_t before = 0;
    for (const Segment& s : p.q[size_t(p.rank)])
        if (s.sequence == b && s.round < segment.round) before += s.length();
    part.push_back(made), row.push_back(int32_t(segment.row)), row_in_sequence.push_back(before);
    longest_q = std::max(longest_q, segment.length()), longest_k = std::max(longest_k, count);
}

fa_status Parts::put(Walk& w, const Problem& p) {
    static_assert(sizeof(fa_part) % sizeof(int32_t) == 0, "parts, then rows, are one table of words");
    const size_t words = part.size() * sizeof(fa_part) / sizeof(int32_t);
    std::vector<int32_t> all(words);
    if (words) std::memcpy(all.data(), part.data(), part.size() * sizeof(fa_part));
    all.insert(all.end(), row.begin(), row.end());
    all.push_back(int32_t(p.rows_q()));
    const int32_t* table = nullptr;
    FA_RETURN_IF_ERROR(w.table(all, &table));
    part_table = reinterpret_cast<const fa_part*>(table), rows_table = table + words;
    return FA_OK;
}

Walk::Walk(const Problem& problem, Needs* counted)
    : problem_(problem),
      counted_(counted),
      pushes_(problem.kind == FA_GROUP_NCCL),
      stages_(problem.kind == FA_GROUP_PROCESSES),
      scratch_base_(reinterpret_cast<char*>(kCountedScratch)),
      shared_base_(reinterpret_cast<char*>(kCountedShared)) {}

Walk::Walk(const Problem& problem, const Needs& needs, Transport& transport, Meeting& meeting, void* stream)
    : problem_(problem),
      transport_(&transport),
      meeting_(&meeting),
      pushes_(problem.kind == FA_GROUP_NCCL),
      stages_(transport.stages()),
      scratch_base_(static_cast<char*>(align_up(problem.a.workspace, kAlign))),
      shared_base_(transport.shared()),
      own_(kMostPublished),
      published_(size_t(problem.size) * kMostPublished) {
    char* end = scratch_base_ + needs.workspace - kAlign;  // the launches' own workspaces are at the end
    for (int64_t i = 0; i < kStreams; ++i) {
        streams_[i] = i ? transport.side_stream(i) : stream;
        nested_bytes_[i] = needs.nested[i], nested_[i] = end -= needs.nested[i];
    }
    if (pushes_) transport.stage_at(shared_base_ + needs.shared);
}

char* Walk::take(size_t& used, int64_t bytes) {
    char* at = (&used == &shared_ ? shared_base_ : scratch_base_) + used;
    used += size_t((bytes + kAlign - 1) / kAlign * kAlign);
    if (counted_) count_memory();
    return at;
}

void Walk::count_memory() {
    counted_->workspace = scratch_ + kAlign, counted_->shared = shared_;
    for (const size_t bytes : counted_->nested) counted_->workspace += bytes;
}

fa_status Walk::publish(Array array, void* data, int64_t pitch, int64_t width, int64_t rows) {
    char* first = static_cast<char*>(data);
    const bool in_shared = runs() ? first >= shared_base_ && first < shared_base_ + transport_->shared_bytes()
                                  : reinterpret_cast<uintptr_t>(first) >= kCountedShared;
    char* staging = stages_ && !in_shared ? shared(width * rows) : nullptr;
    if (!runs()) return FA_OK;
    return transport_->publish({data, pitch, width, rows}, staging, &own_[size_t(array)]);
}

void Walk::add(std::vector<Copy>& copies, int source, int target, Array array, int64_t row, int64_t column, char* to, int64_t to_pitch,
               int64_t width, int64_t rows) const {
    if (width == 0 || rows == 0) return;
    const int64_t from = row * pitch(source, array) + column;
    if (!copies.empty() && !pushes_) {
        Copy& last = copies.back();
        if (last.source == source && last.array == array && last.width == width && last.to_pitch == to_pitch &&
            last.from + last.rows * pitch(source, array) == from && static_cast<char*>(last.to) + last.rows * to_pitch == to) {
            last.rows += rows;
            return;
        }
    }
    copies.push_back({source, target, array, from, to, to_pitch, width, rows});
}

void Walk::count(const std::vector<Copy>& copies) {
    size_t staging = 0;
    for (const Copy& c : copies) {
        if (c.target == problem_.rank && c.source != problem_.rank) counted_->received += c.width * c.rows;
        if (pushes_ && c.source != c.target) staging += size_t(c.width * c.rows + kAlign);
    }
    counted_->transfer = std::max(counted_->transfer, staging);
}

fa_status Walk::move(const std::vector<Copy>& copies, int32_t after) {
    if (runs()) return transport_->move(copies, after);
    count(copies);
    return FA_OK;
}

fa_status Walk::fetch(const std::vector<Copy>& copies, int32_t after, int64_t i, Hidden hidden) {
    if (runs()) return transport_->fetch(copies, after, stream(i), hidden);
    count(copies);
    return FA_OK;
}

fa_status Walk::chain(int64_t from, int64_t to) {
    if (!runs() || stream(from) == stream(to)) return FA_OK;
    return transport_->join(stream(from), stream(to));
}

fa_status Walk::fork() {
    for (int64_t i = 1; i < kStreams; ++i) FA_RETURN_IF_ERROR(chain(0, i));
    return FA_OK;
}

fa_status Walk::join() {
    for (int64_t i = 1; i < kStreams; ++i) FA_RETURN_IF_ERROR(chain(i, 0));
    return FA_OK;
}

template <typename Run, typename Query>
fa_status Walk::launch(fa_attention_args& args, int64_t i, const Run& run, const Query& query) {
    if (runs()) {
        const size_t bytes = nested_bytes_[i % kStreams];
        args.workspace = bytes ? nested_[i % kStreams] : nullptr, args.workspace_bytes = bytes;
        return run(stream(i));
    }
    if (!counted_->own) return FA_OK;
    fa_attention_plan plan{};
    plan.struct_size = sizeof plan;
    hide_counted(args.q.data), hide_counted(args.k.data), hide_counted(args.v.data), hide_counted(args.out.data), hide_counted(args.lse);
    args.workspace = nullptr, args.workspace_bytes = 0;
    FA_RETURN_IF_ERROR(query(&plan));
    size_t& nested = counted_->nested[i % kStreams];
    nested = std::max(nested, (plan.workspace_bytes + kAlign - 1) / kAlign * kAlign);
    count_memory();
    ++counted_->calls;
    return FA_OK;
}

fa_status Walk::attend(fa_attention_args args, int64_t i) {
    return launch(
        args, i, [&](void* stream) { return fa_attention_forward(&args, stream); },
        [&](fa_attention_plan* plan) { return fa_attention_query(&args, plan); });
}

fa_status Walk::differentiate(fa_attention_args args, fa_attention_backward_args gradients, int64_t i) {
    gradients.struct_size = sizeof gradients, gradients.forward = &args;
    if (!runs())
        hide_counted(gradients.dout.data), hide_counted(gradients.dq.data), hide_counted(gradients.dk.data),
            hide_counted(gradients.dv.data);
    return launch(
        args, i, [&](void* stream) { return fa_attention_backward(&gradients, stream); },
        [&](fa_attention_plan* plan) { return fa_attention_backward_query(&gradients, plan); });
}

fa_status Walk::decode(fa_attention_args args, fa_kvcache_args cache) {
    cache.attention = &args;
    return launch(
        args, 0, [&](void* stream) { return fa_kvcache_attention(&cache, stream); },
        [&](fa_attention_plan* plan) { return fa_kvcache_query(&cache, plan); });
}

fa_attention_args bare_args(const Problem& p) {
    fa_attention_args args = p.a;
    args.struct_size = sizeof args;
    args.lse = nullptr, args.workspace = nullptr, args.workspace_bytes = 0;
    args.cu_seqlens_q = args.cu_seqlens_k = nullptr, args.parts = nullptr;
    args.total_q = args.total_k = args.seqlen_q = args.seqlen_k = 0;
    args.batch = p.batch;
    return args;
}

void select_heads(fa_attention_args& args, const Problem& p, int32_t first, int32_t count, int32_t count_k) {
    args.nheads = count, args.nheads_k = count_k;
    args.first_head = p.a.first_head + first;
    if (args.alibi_slopes) args.alibi_slopes = p.a.alibi_slopes + first;
    if (args.sinks) args.sinks = p.a.sinks + first;
    const auto move = [&](fa_score_tensor& t, int64_t element) {
        if (t.data) t.data = static_cast<const char*>(t.data) + first * t.head_stride * element;
    };
    move(args.bias, args.bias_dtype == FA_FLOAT32 ? 4 : p.element), move(args.mask, 1);
}

namespace {

// Puts into args the intervals of a part: those of its keys, for some heads. Rows count from the first row of the part.
fa_status select_intervals(Walk& w, const Problem& p, const fa_part& part, const Heads& heads, fa_attention_args& args, int64_t i) {
    const fa_row_indices& all = p.a.startend_row_indices;
    const bool one = all.heads == 1, of_keys = all.heads == p.a.nheads_k;
    const int32_t count = one ? 1 : of_keys ? heads.count_k : heads.count, group = p.a.nheads / p.a.nheads_k;
    const int64_t first = one ? 0 : of_keys ? heads.first / group : heads.first, keys = part.seqlen_k;
    char* const to = w.scratch(count * std::max<int64_t>(keys, 1) * all.numbers * 4);
    args.startend_row_indices = {reinterpret_cast<int32_t*>(to), 0, keys * all.numbers, all.numbers, count, all.numbers};
    if (!w.runs()) return FA_OK;
    const int64_t offset = part.sequence * all.batch_stride + first * all.head_stride + part.first_key * all.key_stride;
    const HeadRows from{const_cast<int32_t*>(all.data) + offset, all.key_stride, all.head_stride};
    return launch_subtract(p.rows(keys, count, all.numbers), from, part.first_row, reinterpret_cast<int32_t*>(to), w.stream(i));
}

// Calls launch(args, n): once for all parts, or once for each part n.
template <typename Launch>
fa_status each_launch(Walk& w, int64_t i, const Problem& p, const Parts& parts, const PartArrays& arrays, const Heads& heads,
                      const Launch& launch) {
    if (parts.part.empty()) return FA_OK;
    fa_attention_args args = bare_args(p);
    select_heads(args, p, heads.first, heads.count, heads.count_k);
    args.q = arrays.q, args.k = arrays.k, args.v = arrays.v, args.out = arrays.out, args.lse = arrays.lse;
    args.top_left = 0;  // each part has its shift
    args.total_q = p.rows_q(), args.total_k = arrays.total_k;
    args.seqlen_q = parts.longest_q, args.seqlen_k = parts.longest_k;
    args.cu_seqlens_q = parts.rows_table, args.parts = parts.part_table;
    const size_t count = parts.part.size();
    if (!p.parts_stand_alone()) {
        args.batch = int32_t(count);
        return launch(args, 0);
    }
    const fa_attention_args all = args;
    args.batch = 1;
    for (size_t n = 0; n < count; ++n) {
        const fa_part& part = parts.part[n];
        const auto move = [&](fa_score_tensor& to, const fa_score_tensor& from, int64_t element) {
            if (!from.data) return;
            const int64_t offset = part.sequence * from.batch_stride + parts.row_in_sequence[n] * from.row_stride + part.first_key;
            to.data = static_cast<const char*>(from.data) + offset * element;
        };
        move(args.bias, all.bias, args.bias_dtype == FA_FLOAT32 ? 4 : p.element), move(args.mask, all.mask, 1);
        if (all.alibi_slopes) args.alibi_slopes = all.alibi_slopes + part.sequence * all.alibi_batch_stride;
        args.cu_seqlens_q = all.cu_seqlens_q + n, args.parts = all.parts + n;
        args.seqlen_q = part.seqlen_q, args.seqlen_k = part.seqlen_k;
        if (all.startend_row_indices.data) FA_RETURN_IF_ERROR(select_intervals(w, p, part, heads, args, i));
        FA_RETURN_IF_ERROR(launch(args, n));
    }
    return FA_OK;
}

}  // namespace

fa_status attend_parts(Walk& w, const Problem& p, const Parts& parts, const PartArrays& arrays, const Heads& heads, int64_t i) {
    return each_launch(w, i, p, parts, arrays, heads, [&](fa_attention_args args, size_t) { return w.attend(args, i); });
}

fa_status differentiate_parts(Walk& w, const Problem& p, const Parts& parts, const PartArrays& arrays, const Heads& heads) {
    return each_launch(w, 0, p, parts, arrays, heads, [&](fa_attention_args args, size_t n) {
        fa_attention_backward_args g{};
        g.dout = arrays.dout, g.dq = arrays.dq, g.dk = arrays.dk, g.dv = arrays.dv;
        g.dsinks = arrays.dsinks, g.dlse = p.g.dlse;
        g.accumulate = p.parts_stand_alone();
        if (g.dbias = p.g.dbias; g.dbias.data) {
            const fa_part& part = parts.part[n];
            g.dbias.data += part.sequence * g.dbias.batch_stride + parts.row_in_sequence[n] * g.dbias.row_stride + part.first_key;
        }
        return w.differentiate(args, g);
    });
}

fa_status sum_sinks(Walk& w, const Problem& p, int32_t count) {
    if (!p.g.dsinks) return FA_OK;
    const int64_t width = int64_t(p.a.nheads) * 4;
    char* parts = w.scratch(width * count * p.size);
    std::vector<Copy> copies;
    w.each_pair(
        [&](int source, int target) { w.add(copies, source, target, kSinks, 0, 0, parts + source * count * width, width, width, count); });
    FA_RETURN_IF_ERROR(w.fetch(copies, kTotals));
    if (!w.runs()) return FA_OK;
    RowsShape shape = p.rows(1, 1, p.a.nheads);
    shape.dtype = DType::kFloat32;
    return launch_sum(shape, {p.g.dsinks, p.a.nheads, p.a.nheads}, parts, p.a.nheads, count * p.size, w.stream());
}

const Mode& mode_at(int32_t mode) { return mode == FA_MODE_GATHER ? kGather : kUlysses; }

}  // namespace fa::distributed
