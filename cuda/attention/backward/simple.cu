// simple.cu: the gradients of attention on one page. Any head dim, dtype, mask, option and stride: the path that always works.
//
//     P_ij = exp(S_ij - lse_i)     dP_ij = dout_i . v_j     delta_i = dout_i . out_i - dlse_i     dS_ij = P_ij (dP_ij - delta_i) slope_ij
//     dv_j = sum_i P_ij dout_i     dk_j = scale sum_i dS_ij q_i     dq_i = scale sum_j dS_ij k_j
//
// slope is 1 without softcap. Where lse is large, P comes from a maximum and a rest, see large_rows.cuh. S is computed again from q and k,
// so nothing of size seqlen_q x seqlen_k is ever stored. Two mirrored kernels come from one template. In one, a block owns 64 keys, walks
// over the queries of every head that reads them, and holds dK and dV in registers. In the other, a block owns 64 queries, walks over the
// keys, and holds dQ. Each sum has one owner and one order: no atomics, and the same bits every time. The price is that S and dP are
// computed twice: 7 products instead of 5.
//
//     for each tile of walked rows:                                    own = keys            own = queries
//         S  = walked_a own_a^T      64 x 64, in registers             q k^T                 k q^T
//         P  = exp(scale S - lse)    to shared memory, masked
//         dP = walked_b own_b^T                                        dout v^T              v dout^T
//         dS = P (dP - delta)        to shared memory
//         acc_b += P^T walked_b                                        dV += P^T dout        -
//         acc_a += dS^T walked_a                                       dK += dS^T q          dQ += dS k
//
// CUDA cores and fp32 arithmetic, with the bound of flash_attn_minimal.cu: FMAs and the shared-memory reads for them, 16 FMAs for two
// 16-byte reads.
#include "attention/backward/common/score_gradient.cuh"
#include "attention/common/mask.h"
#include "attention/common/online_softmax.cuh"
#include "attention/common/simple_tiles.cuh"
#include "attention/kernels.h"
#include "common/element.cuh"
#include "device/launch.h"

namespace fa {
namespace {

enum class Own { kKeys, kQueries };  // what a block owns; it walks over the other

constexpr int kMaxChunks = 4;   // chunks of an output in registers, 16 floats of a thread each; several blocks share a wider output
constexpr int kSmallWalk = 16;  // walked rows of a tile on sm_75, whose blocks have 64 KiB of shared memory
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kWalk = kSmallWalk;
#else
constexpr int kWalk = 64;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kResident = 1;  // blocks for which a multiprocessor has shared memory
#else
constexpr int kResident = 2;
#endif

template <int kWalkedRows>
struct Smem {
    Tile<kTile> own_a, own_b;              // K and V, or Q and dout: one chunk of columns
    Tile<kWalkedRows> walked_a, walked_b;  // the other pair
    Tile<kWalkedRows> weight, grad;        // [walked row][own row]: P after dropout, dS
    Query query[kTile];                    // of the walked rows, or of the own rows
    int seen[kWalkedRows];                 // whether some pair of this walked row is visible
};
static_assert(sizeof(Smem<64>) <= 99 * 1024, "one block of sm_86 and sm_89");
static_assert(sizeof(Smem<kSmallWalk>) <= 64 * 1024, "one block of sm_75");

// acc[r][c] += sum over walked rows t of weight[t][own row r] * walked[t][column c].
template <int kWalkedRows>
__device__ __forceinline__ void multiply_columns(float (&acc)[4][4], Tile<kWalkedRows>& weight, Tile<kWalkedRows>& walked, int tx, int ty) {
#pragma unroll 4
    for (int t = 0; t < kWalkedRows; ++t) {
        const float4 a = weight.at(t, ty), x = walked.at(t, tx);
        const float row[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            acc[r][0] = fmaf(row[r], x.x, acc[r][0]);
            acc[r][1] = fmaf(row[r], x.y, acc[r][1]);
            acc[r][2] = fmaf(row[r], x.z, acc[r][2]);
            acc[r][3] = fmaf(row[r], x.w, acc[r][3]);
        }
    }
}

// The number of blocks that share the columns of an output that is too wide for the registers of one block.
FA_HOST_DEVICE int gradient_parts(const AttentionParams& p, Own own, int columns) {
    const int widest = own == Own::kKeys && p.headdim_v > p.headdim ? p.headdim_v : p.headdim;
    return (widest + columns - 1) / columns;
}

// Applies the options of the call to a thread's pairs of a tile: P in `weight` becomes P after dropout, the scaled product in `grad` the
// factor of dP - delta. pair_of(r, c): query and key. query_of(r, c): the query's statistics.
template <int kRows, int kWalkedRows, typename PairOf, typename QueryOf>
__device__ __forceinline__ void apply_options(Smem<kWalkedRows>& smem, const AttentionParams& p, int shift, int batch, int head_q, int tx,
                                              int ty, const PairOf& pair_of, const QueryOf& query_of) {
#pragma unroll 1
    for (int e = 0; e < 4 * kRows; ++e) {
        const int r = e / 4, c = e % 4;
        const int2 pair = pair_of(r, c);
        float &weight = smem.weight.element(kRows * ty + r, 4 * tx + c), &factor = smem.grad.element(kRows * ty + r, 4 * tx + c);
        if (hidden(weight)) continue;
        const Query& query = query_of(r, c);
        const PairWeight w = general_weight(p, shift, batch, head_q, pair.x, pair.y, factor, query.max, query.rest);
        weight = w.weight, factor = w.P * w.slope;
    }
}

// Clears the sums of queries that see no key; they may be NaN: 0 times a NaN in K, which other queries see. `query`: the thread's four.
// Called by the whole block: if no keys were walked, no barrier has followed load_queries yet.
template <int kChunks>
__device__ __forceinline__ void clear_empty_queries(float (&acc)[kChunks][4][4], const Query* query) {
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        if (query[r].begin < query[r].end) continue;
#pragma unroll
        for (int x = 0; x < 4 * kChunks; ++x) acc[x / 4][r][x % 4] = 0;
    }
}

// Rows row0 .. last of a gradient: `scale` times the sums, whose columns begin with chunk `first_chunk`. `to`: row 0 of the head.
template <typename T, int kChunks>
__device__ __forceinline__ void store_gradient(const float (&acc)[kChunks][4][4], T* to, int64_t row_stride, int row0, int last,
                                               int first_chunk, int columns, float scale, bool accumulate) {
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        if (row0 + 4 * ty + r > last) continue;
        T* row = to + (row0 + 4 * ty + r) * row_stride;
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const int d = (first_chunk + c) * kTile + 4 * tx + x;
                if (d < columns) row[d] = from_float<T>(acc[c][r][x] * scale + (accumulate ? to_float(row[d]) : 0.0f));
            }
    }
}

template <typename T, int kChunks, Own kOwn>
__global__ void __launch_bounds__(kThreads, kChunks <= 2 ? kResident : 1)
    gradient_kernel(const __grid_constant__ BackwardParams b, const int* wanted) {
    if (wanted && *wanted == 0) return;
    extern __shared__ __align__(16) unsigned char shared[];
    Smem<kWalk>& smem = *reinterpret_cast<Smem<kWalk>*>(shared);
    constexpr bool kOwnsKeys = kOwn == Own::kKeys;
    constexpr int kRows = kWalk / 16;  // rows of S per thread

    // Blocks start in order of their index. Under a causal mask the first keys and the last queries have the longest walks, so they come
    // first.
    const AttentionParams& p = b.forward;
    const int heads = kOwnsKeys ? p.nheads_k : p.nheads, parts = gradient_parts(p, kOwn, kChunks * kTile);
    unsigned index = blockIdx.x;
    const int part = index % parts;
    index /= parts;
    const int head = index % heads;
    index /= heads;
    const int batch = index % p.batch, tiles = gridDim.x / parts / heads / p.batch;
    const int own0 = (kOwnsKeys ? index / p.batch : tiles - 1 - index / p.batch) * kTile;
    const Sequence s = sequence_of(p, batch);
    const int own_rows = kOwnsKeys ? s.seqlen_k : s.seqlen_q;
    if (own0 >= own_rows) return;

    const int head_k = kOwnsKeys ? head : head / p.group, first_head = kOwnsKeys ? head * p.group : head;
    const Rows<T> k(p.k, s.k, head_k, p.headdim), v(p.v, s.v, head_k, p.headdim_v);
    Rows<T> q(p.q, s.q, first_head, p.headdim), dout(b.dout, gradients_of(b, batch).dout, first_head, p.headdim_v);
    const Rows<T>&own_a = kOwnsKeys ? k : q, &own_b = kOwnsKeys ? v : dout, &walked_a = kOwnsKeys ? q : k, &walked_b = kOwnsKeys ? dout : v;
    const int chunks_a = q.chunks(), chunks_b = v.chunks();
    const int last = min(own0 + kTile, own_rows) - 1;
    const int walk_begin = kOwnsKeys ? query_range(p, s, own0).begin : key_range(p, s, own0).begin;
    const int walk_end = kOwnsKeys ? query_range(p, s, last).end : key_range(p, s, last).end;
    const bool general = p.general_scores();
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;

    const auto load_own = [&](Tile<kTile>& tile, const Rows<T>& rows, int chunk) {
        load_tile(tile, rows, own0, chunk, [&](int r) { return own0 + r < own_rows; });
    };
    const auto queries = [&](int i0, int head_q) {
        load_queries(smem.query, kOwnsKeys ? kWalk : kTile, p, rows_of_call(p), s, head_q, i0);
    };

    float acc_a[kChunks][4][4] = {}, acc_b[kOwnsKeys ? kChunks : 1][4][4] = {};
    if (chunks_a == 1) load_own(smem.own_a, own_a, 0);  // loaded once
    if (chunks_b == 1) load_own(smem.own_b, own_b, 0);
    if (!kOwnsKeys) queries(own0, head);

    for (int head_q = first_head; head_q < (kOwnsKeys ? first_head + p.group : first_head + 1); ++head_q) {
        for (int walk0 = walk_begin; walk0 < walk_end; walk0 += kWalk) {
            // The product over all chunks. The last chunk of the walked rows is left in shared memory.
            const auto product = [&](float(&S)[kRows][4], Tile<kWalk>& walked, Tile<kTile>& own, const Rows<T>& walked_side,
                                     const Rows<T>& own_side, int chunks) {
                for (int chunk = 0; chunk < chunks; ++chunk) {
                    if (chunk > 0) __syncthreads();
                    if (chunks > 1) load_own(own, own_side, chunk);
                    load_tile(walked, walked_side, walk0, chunk, [&](int r) { return walk0 + r < walk_end; });
                    __syncthreads();
                    multiply_rows(S, walked, own, tx, ty);
                }
            };

            // ---- P = exp(S - lse), to this thread's places of `weight`; the factor of dP - delta, to its places of `grad` ----
            if (kOwnsKeys) queries(walk0, head_q);
            const auto pair_of = [&](int r, int c) {  // element of the tile -> query, key
                const int walked = walk0 + kRows * ty + r, own = own0 + 4 * tx + c;
                return kOwnsKeys ? make_int2(walked, own) : make_int2(own, walked);
            };
            const auto query_of = [&](int r, int c) -> const Query& { return smem.query[kOwnsKeys ? kRows * ty + r : 4 * tx + c]; };
            {
                float S[kRows][4] = {};
                product(S, smem.walked_a, smem.own_a, walked_a, own_a, chunks_a);
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    float P[4];
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const Query query = query_of(r, c);
                        const int j = pair_of(r, c).y;
                        P[c] =
                            j < query.begin || j >= query.end ? kHidden : exp_nonpositive(fmaf(S[r][c] - query.max, p.scale, -query.rest));
                        if (!general) S[r][c] = P[c];
                    }
                    smem.weight.at(kRows * ty + r, tx) = make_float4(P[0], P[1], P[2], P[3]);
                    smem.grad.at(kRows * ty + r, tx) = make_float4(S[r][0], S[r][1], S[r][2], S[r][3]);
                }
            }
            if (general) apply_options<kRows>(smem, p, s.shift, batch, head_q, tx, ty, pair_of, query_of);

            // ---- dS = P (dP - delta) ----
            bool all_seen = true;
            {
                float dP[kRows][4] = {};
                product(dP, smem.walked_b, smem.own_b, walked_b, own_b, chunks_b);
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    const float4 P = smem.weight.at(kRows * ty + r, tx), factor = smem.grad.at(kRows * ty + r, tx);
                    const auto dS = [&](int c, float weight, float factor) {
                        return score_gradient(p, weight, factor, dP[r][c], query_of(r, c).delta);
                    };
                    smem.grad.at(kRows * ty + r, tx) =
                        make_float4(dS(0, P.x, factor.x), dS(1, P.y, factor.y), dS(2, P.z, factor.z), dS(3, P.w, factor.w));
                    const bool mine = !(hidden(P.x) && hidden(P.y) && hidden(P.z) && hidden(P.w));
                    const bool seen = __ballot_sync(0xFFFFFFFFu, mine) >> (threadIdx.x & 16) & 0xFFFFu;  // by some thread of this row
                    if (tx == 0) smem.seen[kRows * ty + r] = seen;
                    all_seen &= seen;
                }
            }

            // ---- acc_b += P^T walked_b, acc_a += dS^T walked_a ----
            // A walked row that no own row sees has P = dS = 0, but 0 x NaN is NaN: it is zeroed.
            if (!__syncthreads_and(all_seen)) {
                if (!smem.seen[threadIdx.x % kWalk])
                    for (int c = threadIdx.x / kWalk; c < kTile / 4; c += kThreads / kWalk)
                        smem.walked_a.at(threadIdx.x % kWalk, c) = smem.walked_b.at(threadIdx.x % kWalk, c) = make_float4(0, 0, 0, 0);
                __syncthreads();
            }
            const auto accumulate = [&](auto& acc, Tile<kWalk>& weight, Tile<kWalk>& walked, const Rows<T>& walked_side, int chunks) {
#pragma unroll
                for (int c = kChunks - 1; c >= 0; --c) {  // from the last chunk, which is in shared memory
                    const int chunk = part * kChunks + c;
                    if (chunk >= chunks) continue;
                    if (chunk != chunks - 1) {
                        __syncthreads();
                        load_tile(walked, walked_side, walk0, chunk, [&](int r) { return smem.seen[r]; });
                        __syncthreads();
                    }
                    multiply_columns(acc[c], weight, walked, tx, ty);
                }
            };
            if (kOwnsKeys) accumulate(acc_b, smem.weight, smem.walked_b, walked_b, chunks_b);
            accumulate(acc_a, smem.grad, smem.walked_a, walked_a, chunks_a);
            __syncthreads();
        }
        q.data += p.q.head, dout.data += b.dout.head;
    }

    // ---- store the outputs ----
    if (!kOwnsKeys) clear_empty_queries(acc_a, smem.query + 4 * ty);
    const GradientSequence g = gradients_of(b, batch);
    const auto store = [&](const auto& acc, const TensorView& t, int64_t offset, int columns, float scale) {
        store_gradient(acc, static_cast<T*>(t.data) + offset + head * t.head, t.row, own0, last, part * kChunks, columns, scale,
                       b.accumulate);
    };
    if (kOwnsKeys) {
        store(acc_b, b.dv, g.dv, p.headdim_v, 1);
        store(acc_a, b.dk, g.dk, p.headdim, p.scale);
    } else {
        store(acc_a, b.dq, g.dq, p.headdim, p.scale);
    }
}

// Launches the smallest instantiation that holds all columns of an output, or else the largest. (Head dims up to 64 would be 9 % slower on
// an H200 in the instantiation for 128.)
template <typename T, Own kOwn, int kChunks = 1>
cudaError_t launch(const BackwardParams& b, const int* wanted, size_t shared_memory, cudaStream_t stream) {
    const AttentionParams& p = b.forward;
    const int parts = gradient_parts(p, kOwn, kChunks * kTile);
    if (parts > 1) {
        if constexpr (kChunks < kMaxChunks) return launch<T, kOwn, 2 * kChunks>(b, wanted, shared_memory, stream);
    }
    const int64_t rows = kOwn == Own::kKeys ? p.seqlen_k : p.seqlen_q, heads = kOwn == Own::kKeys ? p.nheads_k : p.nheads;
    const int64_t blocks = (rows + kTile - 1) / kTile * heads * p.batch * parts;
    if (blocks == 0) return cudaSuccess;
    const size_t bytes = sizeof(Smem<64>) <= shared_memory ? sizeof(Smem<64>) : sizeof(Smem<kSmallWalk>);
    return launch_kernel(gradient_kernel<T, kChunks, kOwn>, unsigned(blocks), kThreads, bytes, stream, LaunchOptions{}, b, wanted);
}

}  // namespace

size_t backward_simple_workspace(const BackwardParams& b, const DeviceInfo&) { return rows_of_call_bytes(b.forward); }

int64_t backward_simple_blocks(const BackwardParams& b) {
    const AttentionParams& p = b.forward;
    const int64_t queries = (int64_t(p.seqlen_q) + kTile - 1) / kTile * p.nheads * gradient_parts(p, Own::kQueries, kMaxChunks * kTile);
    const int64_t keys = (int64_t(p.seqlen_k) + kTile - 1) / kTile * p.nheads_k * gradient_parts(p, Own::kKeys, kMaxChunks * kTile);
    return p.batch * (queries > keys ? queries : keys);
}

cudaError_t backward_simple(const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream) {
    BackwardParams b = params;
    b.forward.workspace = align_up(params.forward.workspace, alignof(float2));
    const RowsOfCall rows = rows_of_call(b.forward);
    if (const cudaError_t error = backward_delta(b, rows.delta, rows.bases, stream)) return error;
    return backward_simple_if(nullptr, b, device, stream);
}

cudaError_t backward_simple_if(const int* wanted, const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream) {
    BackwardParams b = params;
    b.forward.workspace = align_up(params.forward.workspace, alignof(float2));
    return with_dtype(b.forward.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (const cudaError_t error = launch<T, Own::kKeys>(b, wanted, device.shared_memory, stream)) return error;
        return launch<T, Own::kQueries>(b, wanted, device.shared_memory, stream);
    });
}

}  // namespace fa
