#include "distributed/group.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <new>

#include "api/common/device.h"
#include "api/common/options.h"
#include "cpu/common/parallel.h"

namespace fa::distributed {
namespace {

// The message of a rank at the start of a call. All ranks must ask for the same call.
struct Announcement {
    int32_t status;
    int32_t appends;   // decode: new tokens of this rank
    uint64_t reserve;  // bytes of shared memory
    char text[320];
    enum Field {
        kOperation,
        kMode,
        kLayout,
        kGroups,
        kBatch,
        kHeads,
        kHeadsK,
        kHeaddim,
        kHeaddimV,
        kDtype,
        kDevice,
        kTotalQ,
        kTotalK,
        kLengthsQ,
        kLengthsK,
        kCausal,
        kTopLeft,
        kWindowLeft,
        kWindowRight,
        kScale,
        kWantsLse,
        kWantsDsinks,
        kOptions,  // and those after it: see agreed_options
        kFields = kOptions + kMostAgreed
    };
    int64_t field[kFields];
    Published published[kMostPublished];
};
static_assert(sizeof(Announcement) <= kMessageBytes, "an announcement is one message");

struct FieldName {
    const char* name;
    bool real;           // the field holds the bits of a float
    bool array = false;  // it says whether there is an array of this name
};
constexpr FieldName kFieldNames[Announcement::kOptions] = {{"the operation", false},
                                                           {"mode", false},
                                                           {"layout", false},
                                                           {"groups", false},
                                                           {"batch", false},
                                                           {"nheads", false},
                                                           {"nheads_k", false},
                                                           {"headdim", false},
                                                           {"headdim_v", false},
                                                           {"dtype", false},
                                                           {"device", false},
                                                           {"total_q", false},
                                                           {"total_k", false},
                                                           {"a checksum of cu_seqlens_q", false},
                                                           {"a checksum of cu_seqlens_k", false},
                                                           {"causal", false},
                                                           {"top_left", false},
                                                           {"window_left", false},
                                                           {"window_right", false},
                                                           {"softmax_scale", true},
                                                           {"lse wanted", false},
                                                           {"dsinks wanted", false}};

FieldName name_of(int field) {
    if (field < Announcement::kOptions) return kFieldNames[field];
    Agreed options[kMostAgreed];
    agreed_options(fa_attention_args{}, options);
    const Agreed& option = options[field - Announcement::kOptions];
    return {option.name, option.real, option.array};
}

constexpr const char* kCallNames[] = {
    "", "fa_distributed_forward", "fa_distributed_backward", "fa_distributed_decode", "fa_distributed_merge", "fa_group_reserve"};

int64_t bits(float x) {
    uint32_t word;
    std::memcpy(&word, &x, sizeof word);
    return word;
}
int64_t checksum(const std::vector<int32_t>& values) {  // FNV-1a
    uint64_t hash = 1469598103934665603u;
    for (const int32_t x : values) hash = (hash ^ uint32_t(x)) * 1099511628211u;
    return int64_t(hash >> 1);
}

constexpr int64_t kAnyValue = INT64_MIN;  // for a field that the rank leaves open

void describe(const Problem& p, Announcement* said) {
    using A = Announcement;
    int64_t* f = said->field;
    const fa_attention_args& a = p.a;
    f[A::kOperation] = int64_t(p.operation), f[A::kMode] = p.mode, f[A::kLayout] = p.layout, f[A::kGroups] = p.groups;
    f[A::kBatch] = p.batch, f[A::kHeads] = a.nheads, f[A::kHeadsK] = a.nheads_k, f[A::kHeaddim] = a.headdim, f[A::kHeaddimV] = p.headdim_v;
    f[A::kDtype] = a.dtype, f[A::kDevice] = a.device;
    f[A::kTotalQ] = p.cu_q.empty() ? a.batch * a.seqlen_q : p.total_q(), f[A::kTotalK] = p.cu_k.empty() ? 0 : p.total_k();
    f[A::kLengthsQ] = checksum(p.cu_q), f[A::kLengthsK] = checksum(p.cu_k);
    f[A::kTopLeft] = a.top_left, f[A::kWindowLeft] = p.window.left, f[A::kWindowRight] = p.window.right;
    f[A::kCausal] = a.causal;
    f[A::kScale] = bits(softmax_scale_of(a));
    f[A::kWantsLse] = p.operation == Operation::kForward && a.lse;
    f[A::kWantsDsinks] = p.backward() && p.g.dsinks;
    if (p.operation == Operation::kDecode) said->appends = p.cache.seqlen_new;
    said->reserve = p.reserve;
    // A rank without rows may pass any address, so some fields stay open.
    const bool no_rows = !p.cu_q.empty() && p.rows_q() == 0;
    if (no_rows) f[A::kWantsLse] = kAnyValue;
    Agreed options[kMostAgreed];
    const int count = agreed_options(a, options);
    for (int i = 0; i < count; ++i) f[A::kOptions + i] = no_rows && options[i].of_rows ? kAnyValue : options[i].word;
}

// The failure of another rank. FA_WORKSPACE_TOO_SMALL goes to all ranks or none, because the caller then provides more memory and calls
// again. So any other failure has precedence.
fa_status failure_of_others(const std::vector<Announcement>& all, int rank) {
    for (const bool small : {false, true})
        for (size_t r = 0; r < all.size(); ++r)
            if (int(r) != rank && all[r].status != FA_OK && (all[r].status == FA_WORKSPACE_TOO_SMALL) == small)
                return fail(fa_status(all[r].status), "rank %zu: %s", r, all[r].text);
    return FA_OK;
}

// Compares each field with the first rank that decides it, so every rank reports the same mismatch.
fa_status compare(const std::vector<Announcement>& all) {
    const auto value = [](int64_t word) {
        float real;
        const auto low = uint32_t(word);
        std::memcpy(&real, &low, sizeof real);
        return double(real);
    };
    for (int f = 0; f < Announcement::kFields; ++f) {
        size_t first = 0;
        while (first + 1 < all.size() && all[first].field[f] == kAnyValue) ++first;
        for (size_t r = first + 1; r < all.size(); ++r) {
            const int64_t x = all[r].field[f], expected = all[first].field[f];
            if (x == expected || x == kAnyValue) continue;
            if (f == Announcement::kOperation)
                return fail(FA_BAD_ARGUMENT,
                            "the operation=%" PRId64 " on rank %zu, but %" PRId64
                            " on rank %zu: all ranks make the same call, and these are %s and %s",
                            x, r, expected, first, kCallNames[x], kCallNames[expected]);
            const FieldName field = name_of(f);
            if (field.real)
                return fail(FA_BAD_ARGUMENT, "%s=%g on rank %zu, but %g on rank %zu: all ranks make the same call", field.name, value(x), r,
                            value(expected), first);
            return fail(FA_BAD_ARGUMENT, "%s%s=%" PRId64 " on rank %zu, but %" PRId64 " on rank %zu: all ranks make the same call",
                        field.name, field.array ? " set" : "", x, r, expected, first);
        }
    }
    return FA_OK;
}

// The queries of a causal step are the last tokens, so one rank must know which tokens these are: it appends them in this call.
fa_status check_causal_step(const Problem& p, const std::vector<Announcement>& all) {
    if (p.operation != Operation::kDecode || !p.a.causal || p.a.seqlen_q == 1) return FA_OK;
    int appending = 0;
    for (const Announcement& each : all) appending += each.appends >= p.a.seqlen_q ? 1 : each.appends > 0 ? 2 : 0;
    if (appending == 1) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "causal=1 with seqlen_q=%" PRId64 ": one rank appends at least that many tokens, the others none",
                p.a.seqlen_q);
}

// The collective start of a call: FA_OK on all ranks or on none.
fa_status agree(const Problem& p, fa_status status, const std::vector<Published>& own, Transport& transport, Meeting& meeting,
                std::vector<Published>* published, uint64_t* reserve = nullptr) {
    Announcement mine{};
    mine.status = status;
    const auto refuses = [](fa_status s) { return s != FA_OK && s != FA_WORKSPACE_TOO_SMALL; };
    if (status != FA_OK) std::snprintf(mine.text, sizeof mine.text, "%s", fa_last_error());
    if (!refuses(status)) describe(p, &mine);
    if (!own.empty()) std::memcpy(mine.published, own.data(), sizeof mine.published);
    std::vector<Announcement> all(size_t(p.size));
    const std::string text = status == FA_OK ? "" : fa_last_error();
    FA_RETURN_IF_ERROR(meeting.meet(&mine, all.data(), sizeof mine));
    if (refuses(status)) return fail(status, "%s", text.c_str());
    if (const fa_status others = failure_of_others(all, p.rank); refuses(others)) return others;
    FA_RETURN_IF_ERROR(compare(all));  // also if memory is too small: no rank should get more memory for a call that the others do not make
    if (status != FA_OK) return fail(status, "%s", text.c_str());
    FA_RETURN_IF_ERROR(failure_of_others(all, p.rank));
    FA_RETURN_IF_ERROR(check_causal_step(p, all));
    for (size_t r = 0; reserve && r < all.size(); ++r) *reserve = std::max(*reserve, all[r].reserve);
    published->resize(size_t(p.size) * kMostPublished);
    for (int r = 0; r < p.size; ++r)
        std::memcpy(published->data() + size_t(r) * kMostPublished, all[size_t(r)].published, sizeof mine.published);
    transport.adopt(published->data());
    return FA_OK;
}

}  // namespace

fa_status Walk::begin() {
    if (!runs()) return FA_OK;
    const fa_status ready = transport_->signal(kReady, stream());
    stage_ = Stage::kMet;
    FA_RETURN_IF_ERROR(agree(problem_, ready, own_, *transport_, *meeting_, &published_));
    stage_ = Stage::kAgreed;
    return FA_OK;
}

fa_status walk(Walk& w, const Problem& p) {
    if (p.operation == Operation::kDecode) return decode(w, p);
    if (p.operation == Operation::kMerge) return merge(w, p);
    const Mode& mode = p.size == 1 && !p.g.dbias.data ? kAlone : mode_at(p.mode);
    return p.backward() ? mode.backward(w, p) : mode.forward(w, p);
}

fa_status count(const Problem& p, Needs* needs, bool own) {
    *needs = {};
    needs->own = own;
    Walk counting(p, needs);
    return walk(counting, p);
}

namespace {

// Reserves the group for one call: a rank makes one call at a time.
class Turn {
public:
    explicit Turn(fa_group* group) : group_(group) {
        bool idle = false;
        mine_ = group->busy.compare_exchange_strong(idle, true);
    }
    ~Turn() {
        if (mine_) group_->busy = false;
    }
    fa_status check() const {
        if (!mine_)
            return fail(FA_BAD_ARGUMENT, "group=%p is in another call of this rank: a rank makes one call at a time",
                        static_cast<void*>(group_));
        return group_->meeting->check();
    }

private:
    fa_group* group_;
    bool mine_;
};

// While it lives, this rank may read the memory of the others.
class Reading {
public:
    explicit Reading(Meeting& meeting) : meeting_(meeting) { meeting_.enter(); }
    ~Reading() { meeting_.leave(); }

private:
    Meeting& meeting_;
};

// Runs the walk; afterwards this rank reads no other rank's memory. `broke`: it ended at a point where the ranks cannot tell each other.
fa_status walk_and_leave(Walk& running, const Problem& p, fa_group* group, void* stream, bool* broke) {
    const Reading reading(*group->meeting);
    fa_status status;
    bool threw = false;
    try {
        status = walk(running, p);
    } catch (const std::bad_alloc&) {
        threw = true, status = fail(FA_OUT_OF_MEMORY, "no host memory left");
    }
    const Walk::Stage stage = running.stage();
    *broke = status == FA_RANK_LOST || (stage == Walk::Stage::kMet && threw) || (stage == Walk::Stage::kAgreed && status != FA_OK);
    if (!*broke) {
        if (stage == Walk::Stage::kMet) group->transport->rest(stream);
        return status;
    }
    char text[512];
    std::snprintf(text, sizeof text, "%s", fa_last_error());
    if (status != FA_RANK_LOST) {
        char reason[sizeof text + 32];
        std::snprintf(reason, sizeof reason, "rank %d: %s", p.rank, text);
        group->meeting->abort(reason);
    }
    group->transport->retreat(stream, stage == Walk::Stage::kAgreed);
    return fail(status, "%s", text);
}

}  // namespace

fa_status reserve(fa_group* group, size_t bytes) {
    const Turn turn(group);
    FA_RETURN_IF_ERROR(turn.check());
    Problem p{};
    p.operation = Operation::kReserve, p.rank = group->args.rank, p.size = group->args.size, p.kind = group->args.kind;
    p.reserve = bytes;
    std::vector<Published> none;
    uint64_t most = 0;
    FA_RETURN_IF_ERROR(agree(p, FA_OK, {}, *group->transport, *group->meeting, &none, &most));
    return most <= group->transport->shared_bytes() ? FA_OK : group->transport->reserve(most);
}

fa_status run(fa_group* group, const Problem& p, fa_status status, void* stream) {
    const Turn turn(group);
    FA_RETURN_IF_ERROR(turn.check());
    const CurrentDevice scope(group->args.device == FA_CUDA ? group->args.device_index : -1);
    const cpu::GivenThreads threads(threads_are_given(p.a.num_threads));
    Needs needs;
    if (status == FA_OK) status = group->args.device == FA_CUDA ? scope.status() : FA_OK;
    if (status == FA_OK) status = count(p, &needs);
    if (status == FA_OK) status = group->transport->begin(stream);
    if (status == FA_OK && (p.a.workspace_bytes < needs.workspace || !p.a.workspace))
        status = fail(FA_WORKSPACE_TOO_SMALL, "workspace_bytes=%zu (workspace=%p), but the call needs %zu: ask its query",
                      p.a.workspace_bytes, p.a.workspace, needs.workspace);
    if (const size_t shared = needs.shared + needs.transfer; status == FA_OK && group->transport->shared_bytes() < shared)
        status = fail(FA_WORKSPACE_TOO_SMALL, "the group shares %zu bytes of each rank, but the call needs %zu: call fa_group_reserve",
                      group->transport->shared_bytes(), shared);
    if (status != FA_OK) {
        std::vector<Published> none;
        return agree(p, status, {}, *group->transport, *group->meeting, &none);
    }
    Walk running(p, needs, *group->transport, *group->meeting, stream);
    bool broke = false;
    status = walk_and_leave(running, p, group, stream, &broke);
    if (broke) {
        // After this returns, the caller may free its arrays. Other ranks read these directly, unless the group has copies of them.
        if (!group->transport->stages()) group->meeting->wait_for_readers();
        return status;
    }
    if (status == FA_OK || running.stage() == Walk::Stage::kMet) return status;
    std::vector<Published> none;  // stage kBefore: the other ranks must still be told
    return agree(p, status, {}, *group->transport, *group->meeting, &none);
}

}  // namespace fa::distributed
