// wgmma_w4_sm90/store.cuh: the epilogue of the wgmma products with 4-bit weights. A warpgroup has sums of 64 rows of the weight by kTokens
// tokens. Adjacent sums of a thread belong to different tokens, but in out the features of one token are contiguous, so the sums are
// transposed through shared memory.
#pragma once

#include "device/cluster.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/w4/common/params.h"

namespace fa {

constexpr int kW4Stride = 64 + 4;  // floats between tokens: eight features of four tokens lie in 32 different banks
constexpr int w4_turned(int tokens) { return tokens < 64 ? tokens : 64; }  // tokens that are transposed at a time
constexpr int w4_staging(int tokens) { return tokens < 64 ? 9 * 1024 : 17 * 1024; }
static_assert(w4_staging(64) >= int(sizeof(float)) * kW4Stride * 64 && w4_staging(32) >= int(sizeof(float)) * kW4Stride * 32);

enum W4Barrier : int { kW4Store = 1, kW4Parts = 3 };  // kW4Store + warpgroup: one warpgroup; kW4Parts: both

struct W4Place {
    const W4LinearParams& p;
    const CUtensorMap* map_out;
    bool fours;
    int rows;   // index of the block of 64 rows of the packed weight
    int token;  // the first token
    float factor;
};

// For 16-bit out and residual in rows of 16-byte pieces: handles 64 tokens per turn, in two buffers alternately. A token is a row of
// 128 bytes, 64 features (32 in a pair), in TMA's swizzle. The residual is copied to the buffer first; the thread that has the sum
// reads it there.
//
// A tile of up to 64 tokens has one turn, and then all tiles use the same buffer. A taller tile has an even number of turns, so the buffers
// also alternate from tile to tile. Every turn commits one group of copies, even if it stores nothing. So the newest group belongs to the
// previous turn; all older groups belong to turns that used the other buffer or have finished reading.
template <typename T, int kTokens>
__device__ __forceinline__ void store_fast(const W4Place& place, float (&sums)[kTokens / 2], uint32_t staging) {
    constexpr int kTurned = w4_turned(kTokens), kMine = kTurned * 8 / 128;    // tokens at a time; pieces of a thread
    constexpr int kTurns = kTokens / kTurned, kReading = kTurns > 1 ? 1 : 0;  // groups that may still be reading when a turn begins
    static_assert(kTurns == 1 || kTurns % 2 == 0, "a turn's buffer is not that of the turn before");
    static_assert(2 * kTurned * kChunkRowBytes <= w4_staging(kTokens));
    const W4LinearParams& p = place.p;
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32, barrier = kW4Store + threadIdx.x / 128;
    const int columns = p.columns(), log_pieces = p.swiglu ? 2 : 3, column0 = place.rows * 8 << log_pieces;
    float bias[2];  // for rows g and g + 8 of this thread
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int column = column0 + (p.swiglu ? 8 * warp : 16 * warp + 8 * h) + lane / 4;
        bias[h] = p.bias && column < columns ? load_element(p.bias, column + (p.swiglu ? h * columns : 0), p.bias_dtype) : 0.0f;
    }
    const auto each_piece = [&](int first, const auto& body) {  // body(j, token, piece) for the j-th piece of this thread
#pragma unroll
        for (int j = 0; j < kMine; ++j) {
            const int i = thread + 128 * j, token = i >> log_pieces, piece = i & ((1 << log_pieces) - 1);
            if (token < kTurned && place.token + first + token < p.rows && column0 + 8 * piece < columns) body(j, token, piece);
        }
    };
    uint4 residual[kMine];
    const auto fetch_residual = [&](int first) {
        const T* const from = static_cast<const T*>(p.residual.data) + int64_t(place.token + first) * p.residual.row + column0;
        each_piece(first, [&](int j, int token, int piece) {
            residual[j] = __ldcg(reinterpret_cast<const uint4*>(from + token * p.residual.row + 8 * piece));
        });
    };
    if (p.residual.data) fetch_residual(0);
#pragma unroll
    for (int first = 0; first < kTokens; first += kTurned) {
        const uint32_t buffer = staging + first / kTurned % 2 * (kTurned * kChunkRowBytes);
        const auto at = [&](int token, int piece) { return buffer + token * kChunkRowBytes + ((piece ^ token % 8) << 4); };
        if (thread == 0) bulk_wait_read<kReading>();
        bar_sync(barrier, 128);  // the buffer's earlier contents have been read
        if (p.residual.data) {
            each_piece(first, [&](int j, int token, int piece) { store_shared_16(at(token, piece), residual[j]); });
            if (first + kTurned < kTokens) fetch_residual(first + kTurned);
            bar_sync(barrier, 128);
        }
        if (p.swiglu) {
#pragma unroll
            for (int t = 0; t < kTurned; t += 32) {
                const uint32_t address = at(t + lane, warp);  // matrix m: the eight tokens from t + 8 m on
                uint32_t pairs[4], r[4] = {};
                if (p.residual.data) ldmatrix_x4_trans(r, address);
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const float* s = sums + (first + t + 8 * m) / 2;
                    const float2 y = fa::unpack_16<T>(r[m]);
                    pairs[m] = pack_16<T>(silu(s[0] * place.factor + bias[0]) * (s[2] * place.factor + bias[1]) + y.x,
                                          silu(s[1] * place.factor + bias[0]) * (s[3] * place.factor + bias[1]) + y.y);
                }
                stmatrix_x4_trans(address, pairs);
            }
            bar_sync(barrier, 128);
            T* const out = static_cast<T*>(p.out.data) + int64_t(place.token + first) * p.out.row + column0;
            each_piece(first, [&](int, int token, int piece) {
                *reinterpret_cast<float4*>(out + token * p.out.row + 8 * piece) = load_shared_16(at(token, piece));
            });
        } else {
#pragma unroll
            for (int t = 0; t < kTurned; t += 16) {  // matrix m: the eight tokens from t + 8 (m / 2) on, the eight rows from 8 (m % 2) on
                const uint32_t address = at(t + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
                uint32_t pairs[4], r[4] = {};
                if (p.residual.data) ldmatrix_x4_trans(r, address);
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const float* s = sums + (first + t + m / 2 * 8) / 2 + m % 2 * 2;
                    const float2 y = fa::unpack_16<T>(r[m]);
                    pairs[m] = pack_16<T>(s[0] * place.factor + bias[m % 2] + y.x, s[1] * place.factor + bias[m % 2] + y.y);
                }
                stmatrix_x4_trans(address, pairs);
            }
            fence_proxy_async();
            bar_sync(barrier, 128);
            if (thread == 0) {
                if (column0 < columns && place.token + first < p.rows)
                    tma_store(place.map_out, buffer, column0, place.token + first, 0, 0, 0);
                bulk_commit();
            }
        }
    }
}

// For any dtype: sums are transposed as floats, and a thread finishes four adjacent columns of out.
class W4Columns {
    const W4Place& place_;
    int column_;
    float bias_[2][4];

public:
    int first_row, up;  // for the four columns: the first of their rows among the warpgroup's 64; the distance from gate to up rows

    __device__ __forceinline__ W4Columns(const W4Place& place, int f) : place_(place) {
        const W4LinearParams& p = place.p;
        first_row = p.swiglu ? f / 2 * 16 + f % 2 * 4 : 4 * f, up = p.swiglu ? 8 : 0;
        column_ = place.rows * (p.swiglu ? 32 : 64) + 4 * f;
        const int columns = p.columns();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool exists = p.bias && column_ + i < columns;
            bias_[0][i] = exists ? load_element(p.bias, column_ + i, p.bias_dtype) : 0.0f;
            bias_[1][i] = exists && p.swiglu ? load_element(p.bias, columns + column_ + i, p.bias_dtype) : 0.0f;
        }
    }
    __device__ __forceinline__ void finish(int64_t token, float4 gate, float4 up) const {
        const W4LinearParams& p = place_.p;
        const int columns = p.columns();
        const int64_t to = token * p.out.row + column_, from = token * p.residual.row + column_;
        float* const y = &gate.x;
        float* const z = &up.x;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            y[i] = y[i] * place_.factor + bias_[0][i];
            if (p.swiglu) y[i] = silu(y[i]) * (z[i] * place_.factor + bias_[1][i]);
        }
        if (place_.fours && column_ + 4 <= columns) {
            if (p.residual.data) add_4(gate, load_4(p.residual.data, from, p.residual_dtype));
            store_4(p.out.data, to, p.out_dtype, gate);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (column_ + i < columns)
                    store_element(p.out.data, to + i, p.out_dtype,
                                  y[i] + (p.residual.data ? load_element(p.residual.data, from + i, p.residual_dtype) : 0.0f));
        }
    }
};

// Writes a thread's sums of `tokens` tokens, starting with `first`, to shared memory.
template <int kCount>
__device__ __forceinline__ void put_sums(float* to, const float (&sums)[kCount], int first, int tokens) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = first / 2; i < (first + tokens) / 2; ++i)
        to[(accumulator_column(thread, i) - first) * kW4Stride + accumulator_row(thread, i)] = sums[i];
}

template <int kTokens>
__device__ __forceinline__ void store_staged(const W4Place& place, float (&sums)[kTokens / 2], void* staging) {
    const int thread = threadIdx.x % 128, barrier = kW4Store + threadIdx.x / 128, threads = place.p.swiglu ? 8 : 16;  // for each token
    const W4Columns four(place, thread % threads);
    constexpr int kTurned = w4_turned(kTokens);
    float* const turned = static_cast<float*>(staging);
#pragma unroll
    for (int first = 0; first < kTokens; first += kTurned) {
        bar_sync(barrier, 128);  // the earlier contents have been read
        put_sums(turned, sums, first, kTurned);
        bar_sync(barrier, 128);
#pragma unroll 2
        for (int t = thread / threads; t < kTurned && place.token + first + t < place.p.rows; t += 128 / threads) {
            const float* from = turned + t * kW4Stride + four.first_row;
            four.finish(int64_t(place.token) + first + t, *reinterpret_cast<const float4*>(from),
                        *reinterpret_cast<const float4*>(from + four.up));
        }
    }
}

// For a split tile: the sums of a block are parts. The blocks of the cluster add them up, each for some of the tokens. `parts` is the
// memory of the ring, all of which has been read.
template <int kTokens>
__device__ __forceinline__ void store_parts(const W4Place& place, float (&sums)[kTokens / 2], float* parts, int splits) {
    const int thread = threadIdx.x % 128, threads = place.p.swiglu ? 8 : 16, rank = int(cluster_rank());
    const int last = min(int64_t(kTokens * (rank + 1) / splits), place.p.rows - place.token);
    const W4Columns four(place, thread % threads);
    float* const part = parts + threadIdx.x / 128 * kTokens * kW4Stride;
    bar_sync(kW4Parts, 256);
    put_sums(part, sums, 0, kTokens);
    __syncwarp();
    cluster_arrive_release();
    cluster_wait();
#pragma unroll 1
    for (int t = kTokens * rank / splits + thread / threads; t < last; t += 128 / threads) {
        const uint32_t from = shared_address(part + t * kW4Stride + four.first_row);
        float4 x = make_float4(0, 0, 0, 0), up = x;
        for (int s = 0; s < splits; ++s) {
            const uint32_t other = cluster_address(from, s);
            add_4(x, load_cluster_16(other));
            if (four.up) add_4(up, load_cluster_16(other + four.up * 4));
        }
        four.finish(int64_t(place.token) + t, x, up);
    }
    __syncwarp();
    cluster_arrive_release();
    cluster_wait();  // a block's shared memory must stay until the other blocks have read it
}

}  // namespace fa
