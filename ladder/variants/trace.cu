// trace.cu: wgmma_sm90 at headdim 128, with a record of when each role begins each activity (fa_trace in experiments.h). The first thread
// of each consumer warpgroup and the producer's thread write. The kernel's parts are the library's. What is here wraps the consumer's waits
// and the producer's loads: every activity of a consumer begins where one of its waits begins or ends.
#include "ladder/variants/wgmma_roles.cuh"

namespace fa {
namespace {

// One thread's stamps. Other threads, and blocks after the first FA_TRACE_BLOCKS, record nothing.
class Recorder {
public:
    __device__ __forceinline__ Recorder(const AttentionParams& p, int role) : alone_(role == 0) {
        const bool writes = blockIdx.x < FA_TRACE_BLOCKS && threadIdx.x % 128 == 0;
        fa_trace* const trace = reinterpret_cast<fa_trace*>(static_cast<char*>(p.workspace) + FA_TRACE_OFFSET);
        role_ = writes ? &trace->roles[blockIdx.x][role] : nullptr;
        if (role_) asm volatile("mov.u32 %0, %%smid;" : "=r"(role_->multiprocessor));
    }
    __device__ __forceinline__ void next_item() { ++item_; }
    __device__ __forceinline__ void operator()(fa_trace_event event, int tile) {
        if (role_) {
            uint64_t clock;
            asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock)::"memory");
            if (count_ < FA_TRACE_STAMPS) role_->stamps[count_] = {clock, tile, uint16_t(item_), uint16_t(event)};
            role_->count = ++count_;
        }
        if (!alone_) __syncwarp();  // wgmma takes whole warps
    }

private:
    bool alone_;  // the producer is one thread
    fa_trace_role* role_;
    uint32_t count_ = 0;
    int item_ = -1;
};

}  // namespace

#define FA_TRACED(id, rows_of_64, keys, stages_, turns, maximum_)                                               \
    template <>                                                                                                 \
    inline constexpr WgmmaPlan kWgmmaPlan<WgmmaPlanId(id)> = [] {                                               \
        WgmmaPlan plan;                                                                                         \
        plan.headdim = plan.headdim_v = 128, plan.block_n = keys, plan.warpgroups = rows_of_64;                 \
        plan.stages = stages_, plan.ping_pong = turns, plan.maximum = RowMaximum::maximum_, plan.paged = false; \
        return plan;                                                                                            \
    }();
FA_TRACED(501, 2, 128, 2, false, kLazy)
FA_TRACED(502, 2, 128, 2, true, kLazy)
FA_TRACED(503, 3, 80, 4, true, kSpeculativeUnmasked)
#undef FA_TRACED

namespace {

// The waits of a consumer, with stamps.
template <WgmmaPlanId kId>
struct TracedWaits : ConsumerWaits<kId> {
    using Base = ConsumerWaits<kId>;
    using typename Base::Output, typename Base::Scores, typename Base::Stages;
    Recorder trace;

    __device__ __forceinline__ TracedWaits(const AttentionParams& p, const Consumer& me) : trace(p, 1 + me.wg) {}
    template <int kSlots>
    __device__ __forceinline__ void item(const Ring<kSlots>& work) {
        trace.next_item();
        trace(FA_TRACE_WAIT_ITEM, 0);
        Base::item(work);
    }
    __device__ __forceinline__ void first_keys(const Stages& k, int n) {
        Base::first_keys(k, n);
        trace(FA_TRACE_SCORES, n);
    }
    __device__ __forceinline__ void keys(const Stages& k, int n) {
        trace(FA_TRACE_WAIT_KEYS, n);
        Base::keys(k, n);
    }
    __device__ __forceinline__ void turn(int wg, int n) {
        trace(FA_TRACE_WAIT_TURN, n);
        Base::turn(wg, n);
        trace(FA_TRACE_SCORES, n);
    }
    __device__ __forceinline__ void values(const Stages& v, int n) {
        trace(FA_TRACE_WAIT_VALUES, n);
        Base::values(v, n);
        trace(FA_TRACE_PRODUCT, n);
    }
    __device__ __forceinline__ void first_scores(Scores& S, int n) {
        trace(FA_TRACE_WAIT_SCORES, n);
        Base::first_scores(S, n);
        trace(FA_TRACE_SOFTMAX, n);
    }
    __device__ __forceinline__ void scores(Scores& S, int n) {
        trace(FA_TRACE_WAIT_SCORES, n);
        Base::scores(S, n);
        trace(FA_TRACE_SOFTMAX, n);
    }
    __device__ __forceinline__ void product(Output& O, int n) {
        trace(FA_TRACE_WAIT_PRODUCT, n);
        Base::product(O, n);
        trace(FA_TRACE_RESCALE, n - 1);
    }
    __device__ __forceinline__ void last_product(Output& O, int n) {
        trace(FA_TRACE_WAIT_PRODUCT, n);
        Base::last_product(O, n);
        trace(FA_TRACE_EPILOGUE, n);
    }
};

// The loads of ThreadTiles, with stamps.
template <WgmmaPlanId kId>
struct TracedTiles : ThreadTiles<Bf16, kId> {
    using Base = ThreadTiles<Bf16, kId>;
    using Stages = Ring<kWgmmaPlan<kId>.stages>;
    Recorder trace;

    __device__ __forceinline__ TracedTiles(const Base& tiles) : Base(tiles), trace(tiles.p, 0) {}
    __device__ __forceinline__ void begin_item(const ForwardWork& w) { trace.next_item(), Base::begin_item(w); }
    __device__ __forceinline__ void load_k(const ForwardWork& w, int n, const Stages& k) {
        trace(FA_TRACE_WAIT_KEYS, n);
        Base::load_k(w, n, k);
        trace(FA_TRACE_COPIED, n);
    }
    __device__ __forceinline__ void load_v(const ForwardWork& w, int n, const Stages& v) {
        trace(FA_TRACE_WAIT_VALUES, n);
        Base::load_v(w, n, v);
        trace(FA_TRACE_COPIED, n);
    }
};

template <WgmmaPlanId kId, bool kInOrder>
__global__ void __launch_bounds__(128 * (kWgmmaPlan<kId>.warpgroups + 1), 1)
    traced_wgmma_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                        const __grid_constant__ CUtensorMap map_v, const __grid_constant__ AttentionParams p,
                        const __grid_constant__ WgmmaSchedule schedule) {
    run_roles<Bf16, kId, true>(
        [&](WgmmaSmem<Bf16, kId>& smem) {
            produce(map_q, p, schedule, smem, TracedTiles<kId>(ThreadTiles<Bf16, kId>(map_k, map_v, p, schedule, smem)));
        },
        [&](WgmmaSmem<Bf16, kId>& smem, const Consumer& me) {
            if constexpr (kInOrder) consume_in_order(p, smem, me, TracedWaits<kId>(p, me));
            else consume(p, smem, me, TracedWaits<kId>(p, me));
        });
}

template <int kId, bool kInOrder>
void add_trace(Variants* variants, int order, const char* name, const char* about) {
    constexpr WgmmaPlanId kPlanId = WgmmaPlanId(kId);
    static_assert(kWgmmaPlan<kPlanId>.warpgroups < FA_TRACE_ROLES, "a role for the producer and each consumer warpgroup");
    Variant v = wgmma_variant<kPlanId>("trace", order, about, traced_wgmma_kernel<kPlanId, kInOrder>);
    v.name = std::string("trace_") + name + "_d128";
    v.aligned_workspace = true;
    v.workspace = [](const AttentionParams&, int) -> size_t { return FA_TRACE_OFFSET + sizeof(fa_trace); };
    v.launch = [](const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
        static_assert(FA_TRACE_OFFSET >= 2 * sizeof(int), "the counter of the items stands before the trace");
        if (cudaError_t error = cudaMemsetAsync(p.workspace, 0, FA_TRACE_OFFSET + sizeof(fa_trace), stream))
            return cudaGetLastError(), error;
        ForwardWorkList list = forward_work_list(p, kWgmmaPlan<kPlanId>.block_m(), multiprocessors);
        add_leading_sections(p, multiprocessors, &list);
        return launch_wgmma<Bf16, kPlanId>(p, list, traced_wgmma_kernel<kPlanId, kInOrder>, stream);
    };
    variants->push_back(std::move(v));
}

}  // namespace

void add_trace_variants(Variants* variants) {
    add_trace<501, true>(variants, 1, "in_order", "two consumer warpgroups, each product and softmax to its end");
    add_trace<501, false>(variants, 2, "overlap", "S of the next tile is multiplied with P V; no turns");
    add_trace<502, false>(variants, 3, "ping_pong", "and the warpgroups take turns");
    add_trace<503, false>(variants, 4, "three_warpgroups", "the library's plan for long sequences: 192 rows x 80 keys");
}

}  // namespace fa
