// call.h: one call of one rank. A mode (gather.cpp, ulysses.cpp) is written as a walk through its transfers and launches of
// attention. The Walk either counts the memory that they need or performs them, so a plan and a call cannot disagree.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "api/common/checks.h"
#include "common/philox.h"
#include "distributed/layout.h"
#include "distributed/rows.h"
#include "distributed/transport/transport.h"
#include "flash_attn_distributed.h"

namespace fa::distributed {

enum class Operation : int32_t { kForward = 1, kBackward, kDecode, kMerge, kReserve };

// A checked call. Strides are those of the rank's own arrays.
struct Problem {
    Operation operation;
    fa_attention_args a;           // of the rank; total_q, total_k and the fields that describe sequences are not used
    fa_attention_backward_args g;  // the gradients of a backward call
    fa_kvcache_args cache;         // of a decode call
    std::vector<int32_t> cu_q, cu_k;
    int32_t batch, rank, size, kind, mode, groups;
    fa_layout layout;
    bool wants_dbias;
    size_t reserve;  // for kReserve: bytes of shared memory
    int64_t element, headdim_v;
    std::vector<std::vector<Segment>> q, k;  // segments of every rank
    Window window;

    bool backward() const { return operation == Operation::kBackward; }
    // Bias, mask, intervals and the ALiBi slopes of a batch entry are indexed by part, so each part then needs its own launch.
    bool parts_stand_alone() const {
        return a.bias.data || a.mask.data || a.startend_row_indices.data || (a.alibi_slopes && a.alibi_batch_stride);
    }
    int64_t total_q() const { return cu_q.back(); }
    int64_t total_k() const { return cu_k.back(); }
    int64_t seqlen_q(int32_t b) const { return int64_t(cu_q[size_t(b) + 1]) - cu_q[size_t(b)]; }
    int64_t seqlen_k(int32_t b) const { return int64_t(cu_k[size_t(b) + 1]) - cu_k[size_t(b)]; }
    int64_t rows_q() const { return rows_of(q[size_t(rank)]); }
    int64_t rows_k() const { return rows_of(k[size_t(rank)]); }
    int64_t longest_q() const { return longest(cu_q); }
    int64_t longest_k() const { return longest(cu_k); }
    fa_device device() const { return fa_device(a.device); }
    // Keys that some query of the segment sees; with dropout the interval begins where four random blocks do.
    Interval keys_of(const Segment& s) const {
        return window.keys(s, seqlen_q(s.sequence), seqlen_k(s.sequence), a.dropout_p > 0 ? kDropoutColumns : 1);
    }
    RowsShape rows(int64_t count, int32_t heads, int64_t dim) const;

    static int64_t rows_of(const std::vector<Segment>& segments) {
        return segments.empty() ? 0 : segments.back().row + segments.back().length();
    }

private:
    static int64_t longest(const std::vector<int32_t>& cu);
};

// Indices of published arrays.
enum Array : int32_t { kQ, kK, kV, kDout, kLse, kDelta, kResult, kResultLse, kDk, kDv, kSinks };

// The resources that a walk needs.
struct Needs {
    bool own = true;  // also count the launches of attention
    size_t workspace = 0, shared = 0;
    size_t nested[kStreams] = {};  // part of workspace: for one launch of attention on each stream
    size_t transfer = 0;           // shared memory after `shared` that transfers pass through
    int64_t received = 0;
    int32_t calls = 0, groups = 1;
};

class Walk;

// The parts of one launch of attention: some segments of this rank, and the keys in a buffer that they see.
struct Parts {
    std::vector<fa_part> part;
    std::vector<int32_t> row;              // first row of q of each part; ascending
    std::vector<int64_t> row_in_sequence;  // rows of the same sequence that the rank has before the part: the part's row in bias and mask
    int64_t longest_q = 0, longest_k = 0;
    // Writes the tables of the parts to device memory. Must run on the main stream, before `fork`.
    fa_status put(Walk& w, const Problem& p);
    const int32_t* rows_table = nullptr;  // `row`, then the end of the rank's rows
    const fa_part* part_table = nullptr;
    // Adds a part: the queries of `segment` see keys `keys` of its sequence; the first of these is in row key_row of the buffer.
    void add(const Problem& p, const Segment& segment, Interval keys, int64_t key_row);
};

// The arrays that the parts of a launch read and write: k and v are in a buffer of total_k rows; the others hold all of the rank's rows.
struct PartArrays {
    fa_tensor q, k, v, out;
    float* lse;
    int64_t total_k;
    fa_tensor dout, dq, dk, dv;  // of the backward pass
    float* dsinks;
};

class Walk {
public:
    Walk(const Problem& problem, Needs* counted);                                                            // counts
    Walk(const Problem& problem, const Needs& needs, Transport& transport, Meeting& meeting, void* stream);  // runs

    bool runs() const { return transport_ != nullptr; }
    enum class Stage { kBefore, kMet, kAgreed };  // kMet, kAgreed: in `begin`, the ranks have met; all go on
    Stage stage() const { return stage_; }
    void* stream(int64_t i = 0) const { return streams_[i % kStreams]; }

    // Memory until the end of the call: from the caller's workspace, or from the memory that other ranks can read.
    char* scratch(int64_t bytes) { return take(scratch_, bytes); }
    char* shared(int64_t bytes) { return take(shared_, bytes); }
    // Copies a table to device memory.
    template <typename T>
    fa_status table(const std::vector<T>& values, const T** found) {
        char* place = scratch(int64_t(values.size() * sizeof(T)));
        *found = reinterpret_cast<const T*>(place);
        if (!runs() || values.empty()) return FA_OK;
        return launch_store(problem_.device(), place, values.data(), values.size() * sizeof(T), stream());
    }

    // Publishes an array for the other ranks. All arrays must be published before `begin`, the collective start of the call.
    fa_status publish(Array array, void* data, int64_t pitch, int64_t width, int64_t rows);
    fa_status begin();
    bool has(int rank, Array array) const { return !runs() || published_[size_t(rank) * kMostPublished + size_t(array)].used; }
    int64_t pitch(int rank, Array array) const { return runs() ? published_[size_t(rank) * kMostPublished + size_t(array)].pitch : 0; }

    // Calls body(source, target) for every pair of ranks whose transfers this rank must know.
    template <typename Body>
    void each_pair(const Body& body) const {
        for (int r = 0; r < problem_.size; ++r) body(r, problem_.rank);
        for (int r = 0; pushes_ && r < problem_.size; ++r)
            if (r != problem_.rank) body(problem_.rank, r);
    }
    // Appends a copy to a list: `rows` rows of `width` bytes, from row `row` and byte `column` of an array to `to` of the target, whose
    // rows are to_pitch bytes apart. A copy that continues the last one is joined with it.
    void add(std::vector<Copy>& copies, int source, int target, Array array, int64_t row, int64_t column, char* to, int64_t to_pitch,
             int64_t width, int64_t rows) const;
    fa_status move(const std::vector<Copy>& copies, int32_t after);
    // Makes the copies for work on the i-th stream, which waits for them.
    fa_status fetch(const std::vector<Copy>& copies, int32_t after, int64_t i = 0, Hidden hidden = Hidden::kNot);
    fa_status arrive() { return runs() ? transport_->arrive(stream()) : FA_OK; }
    fa_status follow() { return runs() ? transport_->follow(stream()) : FA_OK; }
    fa_status signal(int32_t signal, int64_t i) { return runs() ? transport_->signal(signal, stream(i)) : FA_OK; }
    fa_status fence() { return runs() ? transport_->fence() : FA_OK; }
    // fork: the other streams wait for the caller's stream. join: the caller's stream waits for the others.
    fa_status fork();
    fa_status join();
    // Stream `to` waits for the work that stream `from` has been given so far.
    fa_status chain(int64_t from, int64_t to);
    fa_status finish() { return runs() ? transport_->finish(stream()) : FA_OK; }

    // One launch of attention, of either pass, on stream i. The walk fills in the workspace.
    fa_status attend(fa_attention_args args, int64_t i = 0);
    fa_status differentiate(fa_attention_args args, fa_attention_backward_args gradients, int64_t i = 0);
    fa_status decode(fa_attention_args args, fa_kvcache_args cache);

private:
    char* take(size_t& used, int64_t bytes);
    void count(const std::vector<Copy>& copies);
    void count_memory();
    template <typename Run, typename Query>
    fa_status launch(fa_attention_args& args, int64_t i, const Run& run, const Query& query);

    const Problem& problem_;
    Needs* counted_ = nullptr;
    Transport* transport_ = nullptr;
    Meeting* meeting_ = nullptr;
    void* streams_[kStreams] = {};  // the caller's stream first; on the CPU all NULL
    Stage stage_ = Stage::kBefore;
    bool pushes_, stages_;
    size_t scratch_ = 0, shared_ = 0;
    char *scratch_base_, *shared_base_;
    char* nested_[kStreams] = {};
    size_t nested_bytes_[kStreams] = {};
    std::vector<Published> own_, published_;
};

// Processes heads in pieces, piece i on the i-th stream. list(i, copies) lists what has to be fetched for piece i of every rank. work(i),
// for i < mine, launches the attention of this rank's piece i; it may also use what was fetched for earlier pieces. Nothing hides the
// first transfer, so other transfers wait until it is done. Transfers by kernels are launched before the first attention, which would
// occupy every SM.
template <typename List, typename Work>
fa_status each_piece(Walk& w, size_t count, size_t mine, const List& list, const Work& work) {
    constexpr Hidden hidden[] = {Hidden::kNot, Hidden::kBehindLittle, Hidden::kBehindMuch};
    const auto fetch = [&](size_t i) -> fa_status {
        if (i >= count) return FA_OK;
        std::vector<Copy> copies;
        list(i, copies);
        FA_RETURN_IF_ERROR(w.fetch(copies, kReady, int64_t(i), hidden[std::min<size_t>(i, 2)]));
        return i == 0 ? w.follow() : w.chain(int64_t(i) - 1, int64_t(i));
    };
    for (size_t i = 0; i < size_t(kStreams); ++i) FA_RETURN_IF_ERROR(fetch(i));
    for (size_t i = 0; i < count; ++i) {
        if (i < mine) FA_RETURN_IF_ERROR(work(i));
        FA_RETURN_IF_ERROR(fetch(i + kStreams));
    }
    return FA_OK;
}

// Heads first .. first + count - 1, and their count_k key heads.
struct Heads {
    int32_t first, count, count_k;
};
fa_status attend_parts(Walk& w, const Problem& p, const Parts& parts, const PartArrays& arrays, const Heads& heads, int64_t i);
// The gradients. Key ranges of the parts are disjoint and ascending. dq, dk, dv and dsinks must be zero before the call; rows outside the
// parts are not touched. If p.parts_stand_alone(), dbias is added to.
fa_status differentiate_parts(Walk& w, const Problem& p, const Parts& parts, const PartArrays& arrays, const Heads& heads);

// A packed (rows, heads, dim) array.
inline fa_tensor packed(char* data, int64_t heads, int64_t dim) { return {data, 0, heads * dim, dim}; }

// Adds up dsinks of all ranks: every rank has published `count` sets of nheads floats as kSinks.
fa_status sum_sinks(Walk& w, const Problem& p, int32_t count);

// The struct for a launch of attention over packed rows of q with some of their keys in a buffer: everything except arrays,
// sequences and heads.
fa_attention_args bare_args(const Problem& p);
// Restricts ALiBi slopes, sinks, bias, mask and dropout of a launch to these heads.
void select_heads(fa_attention_args& args, const Problem& p, int32_t first, int32_t count, int32_t count_k);

// The modes. `refusal` returns a reason not to serve the call, or an empty string.
struct Mode {
    const char* name;
    const char* (*refusal)(const Problem& p, char* text, size_t size);
    fa_status (*forward)(Walk& w, const Problem& p);
    fa_status (*backward)(Walk& w, const Problem& p);
};
extern const Mode kGather, kUlysses, kAlone;

// decode.cpp. Both use p.a for the rows of q, (batch, seqlen_q); a decode call also has p.cache.
fa_status decode(Walk& w, const Problem& p);
fa_status merge(Walk& w, const Problem& p);
const Mode& mode_at(int32_t mode);

// A query may leave arrays NULL; they stay NULL.
inline void* forward_by(void* data, int64_t bytes) { return data ? static_cast<char*>(data) + bytes : nullptr; }
inline char* at_row(const fa_tensor& t, int64_t row, int64_t element) {
    return static_cast<char*>(forward_by(t.data, row * t.row_stride * element));
}

}  // namespace fa::distributed
