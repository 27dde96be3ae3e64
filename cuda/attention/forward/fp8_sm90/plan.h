// fp8_sm90/plan.h: the instantiations of fp8_sm90 and their shapes, with the reason for each number, and the choice among them for a call.
#pragma once

#include <cstdint>

#include "attention/common/params.h"

namespace fa {

enum class Fp8PlanId { kD64Short, kD64Long, kD128Short, kD128Long, kD256, kD256Long };

// The tensor cores truncate every 8-bit product at 2^-13 of the sum that it is added to. Sums over more than kFp8Promotion keys are
// therefore promoted to additions in float, unless fast_accum allows otherwise.
enum class Fp8Sum {
    kTensorCores,  // never promoted
    kShared,       // every kFp8Promotion keys, O is added to its sum in shared memory and starts afresh; never with fast_accum
    kPieces        // tile by tile, 64 head dims at a time, in registers that S leaves free: one product has to wait for the other
};
constexpr int kFp8Promotion = 1024;

struct Fp8Plan {
    int headdim = 0;                 // the largest head dim of q, k and v; the copy engine pads smaller ones with zeros
    int block_n = 128;               // keys per tile
    int warpgroups = 2;              // consumer warpgroups, 64 query rows each
    int k_stages = 2, v_stages = 2;  // K tiles in flight; V tiles, and V^T tiles, in flight
    bool ping_pong = false;          // the warpgroups take turns to issue products
    bool q_in_registers = false;     // Q is read into registers and leaves its buffer at once
    Fp8Sum sum = Fp8Sum::kTensorCores;

    FA_HOST_DEVICE constexpr int block_m() const { return 64 * warpgroups; }
    // Whether a warpgroup skips tiles that a causal mask hides from all of its own 64 rows, though not from the whole block. It pays where
    // the block has more rows than a tile has keys: +2 .. 4 % up to 4k causal, +0 .. 2 % beyond.
    FA_HOST_DEVICE constexpr bool passes_hidden_tiles() const { return block_m() > block_n; }
    FA_HOST_DEVICE constexpr int columns() const { return (headdim + 127) / 128 * 128; }  // of Q, K, V in shared memory: chunks of 128
    FA_HOST_DEVICE constexpr int keys() const { return (block_n + 127) / 128 * 128; }     // of V^T in shared memory, in chunks of 128
    // The block's 64 Ki registers are 168 x 384 threads or 128 x 512. 128 keys at head dims 128 and 256 take 240 per consumer thread and
    // leave 24 for the producer.
    FA_HOST_DEVICE constexpr int consumer_registers() const { return warpgroups == 3 ? 160 : headdim >= 128 ? 240 : 232; }
    FA_HOST_DEVICE constexpr int producer_registers() const { return warpgroups == 3 ? 32 : 504 - 2 * consumer_registers(); }
};

// The comparisons are from one H200 with CUDA 13.0, e4m3, 16384 tokens, heads x headdim = 2048. fast_accum affects the long plans only.
FA_HOST_DEVICE constexpr Fp8Plan fp8_plan(Fp8PlanId id) {
    Fp8Plan plan;
    switch (id) {
        // Short items start and end sooner with two warpgroups, and need no turns: 9 .. 10 % over the long plan up to 1k causal.
        case Fp8PlanId::kD64Short: plan.headdim = 64, plan.k_stages = 4, plan.v_stages = 3, plan.q_in_registers = true; break;
        // Three warpgroups, 192 rows, share the transposition of a tile: 11 .. 28 % faster than 128 rows from 2k on. Promotion costs 2 .. 7
        // %. Variants: no turns -4 .. -6 %; Q in shared memory -10 %; 160 keys -14 % (the products are serialised, C7512); two warpgroups
        // with 192 keys -17 %.
        case Fp8PlanId::kD64Long:
            plan.headdim = 64, plan.warpgroups = 3, plan.k_stages = 4, plan.v_stages = 3;
            plan.ping_pong = plan.q_in_registers = true, plan.sum = Fp8Sum::kShared;
            break;
        // Two warpgroups have registers for Q.
        case Fp8PlanId::kD128Short: plan.headdim = 128, plan.k_stages = 4, plan.v_stages = 3, plan.q_in_registers = true; break;
        // 160 registers hold 96 keys beside 64 registers of O. Promotion costs 2 .. 8 %, the time that shared memory takes for O; promotion
        // every 512 keys 5 % more. Variants: no turns -1 .. -2 %; two warpgroups with 160, 192, 224 keys, without promotion: -2 .. -13 %.
        case Fp8PlanId::kD128Long:
            plan.headdim = 128, plan.block_n = 96, plan.warpgroups = 3, plan.k_stages = 3;
            plan.ping_pong = true, plan.sum = Fp8Sum::kShared;
            break;
        // Turns +0 .. 2 %. 96 keys -14 %.
        case Fp8PlanId::kD256: plan.headdim = 256, plan.ping_pong = true; break;
        // Shared memory has no room for O. 6 .. 9 % slower than summing in the tensor cores.
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
