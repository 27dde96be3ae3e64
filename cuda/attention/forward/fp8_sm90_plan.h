// fp8_sm90_plan.h: the instantiations of fp8_sm90 and their shapes, with the reason beside each number, and which of them a call takes.
#pragma once

#include <cstdint>

#include "attention/common/params.h"

namespace fa {

enum class Fp8PlanId { kD64Short, kD64Long, kD128Short, kD128Long, kD256, kD256Long };

// The tensor cores cut every 8-bit product off at 2^-13 of the sum it joins. Sums over more than kFp8Promotion keys are therefore promoted
// to additions in float, unless fast_accum allows otherwise.
enum class Fp8Sum {
    kTensorCores,  // never promoted
    kShared,       // every kFp8Promotion keys O is added to its sum in shared memory and starts afresh; never with fast_accum
    kPieces        // tile by tile, 64 head dims at a time, in registers that S leaves free: one product has to wait for the other
};
constexpr int kFp8Promotion = 1024;

struct Fp8Plan {
    int headdim = 0;                 // the largest of q, k and v that it serves; smaller ones are padded with zeros by the copy engine
    int block_n = 128;               // keys per tile
    int warpgroups = 2;              // consumer warpgroups, 64 query rows each
    int k_stages = 2, v_stages = 2;  // tiles of K in flight; of V, and of V^T
    bool ping_pong = false;          // the warpgroups take turns to issue products
    bool q_in_registers = false;     // Q leaves its buffer at once
    Fp8Sum sum = Fp8Sum::kTensorCores;

    FA_HOST_DEVICE constexpr int block_m() const { return 64 * warpgroups; }
    // Whether a warpgroup passes tiles by that a causal mask hides from its own 64 rows, though not from the whole block: where the block
    // is taller than a tile is long. +2 .. 4 % up to 4k causal, +0 .. 2 % beyond.
    FA_HOST_DEVICE constexpr bool passes_hidden_tiles() const { return block_m() > block_n; }
    FA_HOST_DEVICE constexpr int columns() const { return (headdim + 127) / 128 * 128; }  // of Q, K, V in shared memory: chunks of 128
    FA_HOST_DEVICE constexpr int keys() const { return (block_n + 127) / 128 * 128; }     // of V^T in shared memory, likewise
    // Of the block's 64 Ki registers: 168 x 384 threads or 128 x 512. 128 keys at head dim 128 and 256 take 240, leaving the producer 24.
    FA_HOST_DEVICE constexpr int consumer_registers() const { return warpgroups == 3 ? 160 : headdim >= 128 ? 240 : 232; }
    FA_HOST_DEVICE constexpr int producer_registers() const { return warpgroups == 3 ? 32 : 504 - 2 * consumer_registers(); }
};

// The comparisons are from one H200 with CUDA 13.0, e4m3, 16384 tokens, heads x headdim = 2048. fast_accum changes the long plans only.
FA_HOST_DEVICE constexpr Fp8Plan fp8_plan(Fp8PlanId id) {
    Fp8Plan plan;
    switch (id) {
        // Short items start and end sooner with two warpgroups, and need no turns: 9 .. 10 % over the long plan up to 1k causal.
        case Fp8PlanId::kD64Short: plan.headdim = 64, plan.k_stages = 4, plan.v_stages = 3, plan.q_in_registers = true; break;
        // 192 rows share a tile's transposition: 11 .. 28 % over 128 rows from 2k on. Promotion: 2 .. 7 %. Without turns -4 .. -6 %, Q in
        // shared memory -10 %, 160 keys -14 % (the products are serialised, C7512), two warpgroups with 192 keys -17 %.
        case Fp8PlanId::kD64Long:
            plan.headdim = 64, plan.warpgroups = 3, plan.k_stages = 4, plan.v_stages = 3;
            plan.ping_pong = plan.q_in_registers = true, plan.sum = Fp8Sum::kShared;
            break;
        // Room for Q in registers.
        case Fp8PlanId::kD128Short: plan.headdim = 128, plan.k_stages = 4, plan.v_stages = 3, plan.q_in_registers = true; break;
        // 96 keys are what 160 registers hold beside 64 of O. Promotion: 2 .. 8 %, the time that shared memory takes for O; every 512 keys
        // 5 % more. Without turns -1 .. -2 %. Two warpgroups with 160, 192, 224 keys: -2 .. -13 % without promotion.
        case Fp8PlanId::kD128Long:
            plan.headdim = 128, plan.block_n = 96, plan.warpgroups = 3, plan.k_stages = 3;
            plan.ping_pong = true, plan.sum = Fp8Sum::kShared;
            break;
        // Turns +0 .. 2 %. 96 keys -14 %.
        case Fp8PlanId::kD256: plan.headdim = 256, plan.ping_pong = true; break;
        // Shared memory has no room for O. 6 .. 9 % behind the sum in the tensor cores.
        case Fp8PlanId::kD256Long: plan.headdim = 256, plan.sum = Fp8Sum::kPieces; break;
    }
    return plan;
}

constexpr int kFp8MaxHeadDim = 256;

inline Fp8PlanId fp8_choose(const AttentionParams& p) {
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    const bool causal = p.window_right >= 0;
    if (d <= 64) return causal && p.seqlen_k <= 1024 ? Fp8PlanId::kD64Short : Fp8PlanId::kD64Long;
    if (d <= 128) return p.seqlen_k <= 1024 ? Fp8PlanId::kD128Short : Fp8PlanId::kD128Long;
    return p.fast_accum || p.seqlen_k <= kFp8Promotion ? Fp8PlanId::kD256 : Fp8PlanId::kD256Long;
}

}  // namespace fa
