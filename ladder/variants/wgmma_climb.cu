// wgmma_climb.cu: from the first wgmma to the wgmma_sm90 kernel, one change a step, at headdim 128. Steps 10 to 12 run the loop of
// wgmma_roles.cuh, in which nothing overlaps but the copies; the others are plans and grids of the library's kernel.
#include "ladder/variants/wgmma_roles.cuh"

namespace fa {

constexpr WgmmaPlan climb_plan(int warpgroups, int block_n, int stages, bool ping_pong, bool q_in_registers, RowMaximum maximum) {
    WgmmaPlan plan;
    plan.headdim = plan.headdim_v = 128, plan.block_n = block_n, plan.warpgroups = warpgroups, plan.stages = stages;
    plan.ping_pong = ping_pong, plan.q_in_registers = q_in_registers, plan.maximum = maximum, plan.paged = false;
    return plan;
}
#define FA_PLAN(id, ...) \
    template <>          \
    inline constexpr WgmmaPlan kWgmmaPlan<WgmmaPlanId(id)> = climb_plan(__VA_ARGS__);
FA_PLAN(401, 1, 128, 2, false, false, RowMaximum::kLazy)
FA_PLAN(402, 2, 128, 2, false, false, RowMaximum::kLazy)
FA_PLAN(403, 2, 128, 2, true, false, RowMaximum::kLazy)
FA_PLAN(404, 2, 128, 2, true, true, RowMaximum::kLazy)
FA_PLAN(405, 2, 128, 3, true, true, RowMaximum::kLazy)
FA_PLAN(406, 2, 128, 3, false, false, RowMaximum::kSpeculative)
FA_PLAN(407, 3, 80, 4, true, false, RowMaximum::kSpeculativeUnmasked)
#undef FA_PLAN

namespace {

enum class Loop { kInOrder, kInOrderMovingRegisters, kLibrary };
template <int kId, Loop kLoop>
WgmmaKernel kernel_of() {
    constexpr WgmmaPlanId kPlanId = WgmmaPlanId(kId);
    if constexpr (kLoop == Loop::kLibrary) return forward_wgmma_kernel<Bf16, kPlanId, KeyLoads::kTilesOrRows>;
    else return in_order_wgmma_kernel < Bf16, kPlanId, kLoop == Loop::kInOrderMovingRegisters > ;
}

// A step with a block for each item.
template <int kId, Loop kLoop, Grid kGrid>
void add_blocks(Variants* variants, int order, const char* name, const char* about) {
    constexpr WgmmaPlanId kPlanId = WgmmaPlanId(kId);
    Variant v = wgmma_variant<kPlanId>("optimisation", order, about, kernel_of<kId, kLoop>());
    v.name = "forward_" + std::to_string(order) + "_" + name + "_d128";
    v.launch = [](const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
        return launch_wgmma<Bf16, kPlanId>(p, block_per_item<kPlanId, kGrid>(p, multiprocessors), kernel_of<kId, kLoop>(), stream);
    };
    variants->push_back(std::move(v));
}
// A step with persistent blocks, like the library's kernel.
template <int kId>
void add_persistent(Variants* variants, int order, const char* name, const char* about) {
    constexpr WgmmaPlanId kPlanId = WgmmaPlanId(kId);
    Variant v = wgmma_variant<kPlanId>("optimisation", order, about, kernel_of<kId, Loop::kLibrary>());
    v.name = "forward_" + std::to_string(order) + "_" + name + "_d128";
    v.workspace = [](const AttentionParams& p, int multiprocessors) {
        return work_list_workspace(p, kWgmmaPlan<kPlanId>.block_m(), multiprocessors);
    };
    v.launch = launch_wgmma<Bf16, kPlanId>;
    variants->push_back(std::move(v));
}

}  // namespace

void add_wgmma_climb_variants(Variants* variants) {
    constexpr Grid kHeads = Grid::kBlockPerItem, kLongest = Grid::kBlockPerItemLongestFirst;
    add_blocks<401, Loop::kInOrder, kHeads>(variants, 10, "wgmma", "TMA and wgmma: a producer and one consumer warpgroup");
    add_blocks<402, Loop::kInOrder, kHeads>(variants, 11, "two_warpgroups", "two consumer warpgroups share K and V");
    add_blocks<402, Loop::kInOrderMovingRegisters, kHeads>(variants, 12, "setmaxnreg", "the producer's registers go to the consumers");
    add_blocks<402, Loop::kLibrary, kHeads>(variants, 13, "overlap", "the next scores are multiplied with P V: softmax under P V");
    add_blocks<403, Loop::kLibrary, kHeads>(variants, 14, "ping_pong", "turns: the softmax of a warpgroup under the products of the other");
    add_blocks<403, Loop::kLibrary, kLongest>(variants, 15, "longest_first", "causal: heads in sections of L2, items with most keys first");
    add_persistent<403>(variants, 16, "persistent", "a block on each multiprocessor takes one item after another");
    add_persistent<404>(variants, 17, "next_item", "Q in registers: the next item's first product runs under the epilogue");
    add_persistent<405>(variants, 18, "three_stages", "a third tile of K and of V in flight");
    add_persistent<406>(variants, 19, "speculative", "the maximum is computed for the first tile alone; no turns, Q in shared memory");
    add_persistent<407>(variants, 20, "three_warpgroups", "192 rows x 80 keys: a third less traffic from L2; turns; four stages");
}

}  // namespace fa
