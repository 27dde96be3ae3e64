// mma_climb.cu: from CUDA cores to the mma_sm80 kernel, one change a step. The enum Step says what each step adds.
//
// A block of 4 warps computes 64 rows (from kTallWarps on 128) over tiles of 64 keys, last keys first. A warp owns its rows, so the softmax
// of a row takes the four lanes of a quad, and P goes from accumulators to A fragments without leaving the registers.
#include <cfloat>

#include "attention/common/epilogue.cuh"
#include "attention/common/mask.h"
#include "attention/common/online_softmax.cuh"
#include "attention/common/shared_tile.cuh"
#include "device/launch.h"
#include "device/mma.cuh"
#include "ladder/variants/variant.h"

namespace fa {
namespace {

enum class Step {
    kTensorCores = 4,  // mma.sync; tiles copied through registers, fragments read from shared memory element pair by pair
    kLdmatrix = 5,     // shared memory is swizzled; ldmatrix reads four 8 x 8 matrices at a time, V transposed on the way
    kAsync = 6,        // cp.async copies the next tile of K and V while this one is computed
    kLazy = 7,         // 2^x with the scale folded in; O is rescaled only after a rise of 2^8; only tiles that cut are masked
    kTallWarps = 8     // a warp has 32 rows: a fragment of K or V feeds two mma
};

using T = __nv_bfloat16;
constexpr int kKeys = 64, kThreads = 128, kTilesN = kKeys / 8;
constexpr int mmas_of(Step step) { return step >= Step::kTallWarps ? 2 : 1; }  // 16-row tiles of a warp
constexpr int rows_of(Step step) { return 64 * mmas_of(step); }
constexpr int stages_of(Step step) { return step >= Step::kAsync ? 2 : 1; }

template <int kD, Step kStep>
struct Smem {
    alignas(128) T q[rows_of(kStep) * kD];
    alignas(128) T k[stages_of(kStep)][kKeys * kD];
    alignas(128) T v[stages_of(kStep)][kKeys * kD];
};

// tile[r] = row r of the source, zeros from row `end` on.
template <int kRows, int kD, Step kStep>
__device__ __forceinline__ void copy_tile(T* tile, const T* source, int64_t stride, int end) {
    if constexpr (kStep >= Step::kAsync) {
        load_tile<kRows, kD, kThreads, false>(tile, source, stride, 0, end, kD, true);
    } else {
        using Tile = SharedTile<T, kD>;
#pragma unroll 4
        for (int x = threadIdx.x; x < kRows * Tile::kPieces; x += kThreads) {
            const int r = x / Tile::kPieces, piece = x % Tile::kPieces;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (r < end) value = *reinterpret_cast<const uint4*>(source + r * stride + piece * 8);
            const int to = kStep >= Step::kLdmatrix ? int(Tile::offset(r, piece)) : r * Tile::kPitch + piece * 16;
            *reinterpret_cast<uint4*>(reinterpret_cast<char*>(tile) + to) = value;
        }
    }
}

// ---- fragments, before ldmatrix; g = lane / 4, q = lane % 4 ----

template <int kD>
__device__ __forceinline__ uint32_t pair_at(const T* tile, int row, int column) {
    return *reinterpret_cast<const uint32_t*>(tile + row * kD + column);
}
// Rows row0 .. + 15, columns 16 step .. + 15, as A.
template <int kD>
__device__ __forceinline__ void read_a(uint32_t (&a)[4], const T* tile, int row0, int step, int lane) {
    const int row = row0 + lane / 4, column = 16 * step + lane % 4 * 2;
    a[0] = pair_at<kD>(tile, row, column), a[1] = pair_at<kD>(tile, row + 8, column);
    a[2] = pair_at<kD>(tile, row, column + 8), a[3] = pair_at<kD>(tile, row + 8, column + 8);
}
// Keys key0 .. + 15 of K, columns 16 step .. + 15, as two B.
template <int kD>
__device__ __forceinline__ void read_b(uint32_t (&b)[2][2], const T* tile, int key0, int step, int lane) {
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) b[t][i] = pair_at<kD>(tile, key0 + 8 * t + lane / 4, 16 * step + 8 * i + lane % 4 * 2);
}
// Keys 16 step .. + 15 of V, columns column0 .. + 15, as two B: V is stored with its columns together, so a pair of keys is two reads.
template <int kD>
__device__ __forceinline__ void read_b_transposed(uint32_t (&b)[2][2], const T* tile, int step, int column0, int lane) {
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(tile);
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int key = 16 * step + 8 * i + lane % 4 * 2, column = column0 + 8 * t + lane / 4;
            b[t][i] = bits[key * kD + column] | uint32_t(bits[(key + 1) * kD + column]) << 16;
        }
}

// ---- the kernel ----

template <int kD, Step kStep>
__global__ void __launch_bounds__(kThreads) climb_kernel(const __grid_constant__ AttentionParams p) {
    constexpr int kMmas = mmas_of(kStep), kRows = rows_of(kStep), kStages = stages_of(kStep), kThreadRows = 2 * kMmas, kTilesV = kD / 8;
    constexpr bool kSwizzled = kStep >= Step::kLdmatrix, kFolded = kStep >= Step::kLazy;
    using Tile = SharedTile<T, kD>;
    extern __shared__ __align__(128) unsigned char shared[];
    Smem<kD, kStep>& smem = *reinterpret_cast<Smem<kD, kStep>*>(shared);

    const int tiles = (p.seqlen_q + kRows - 1) / kRows, index = blockIdx.x / tiles, b = index / p.nheads, head = index % p.nheads;
    const int row0 = blockIdx.x % tiles * kRows;
    const Sequence s = sequence_of(p, b);
    const T* q = static_cast<const T*>(p.q.data) + s.q + head * p.q.head + row0 * p.q.row;
    const T* k = static_cast<const T*>(p.k.data) + s.k + head / p.group * p.k.head;
    const T* v = static_cast<const T*>(p.v.data) + s.v + head / p.group * p.v.head;
    const int end_key = key_range(p, s, min(row0 + kRows, s.seqlen_q) - 1).end, last_tile = (end_key + kKeys - 1) / kKeys - 1;
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kMmas;  // first row of this warp in the block

    const uint32_t q_lane = shared_address(smem.q) + Tile::offset(warp_row + lane % 16, lane / 16);
    const uint32_t k_lane = shared_address(smem.k) + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    const uint32_t v_lane = shared_address(smem.v) + Tile::offset(lane % 16, lane / 16);
    const auto copy_keys = [&](int tile, int stage) {
        copy_tile<kKeys, kD, kStep>(smem.k[stage], k + tile * kKeys * p.k.row, p.k.row, end_key - tile * kKeys);
        copy_tile<kKeys, kD, kStep>(smem.v[stage], v + tile * kKeys * p.v.row, p.v.row, end_key - tile * kKeys);
    };

    const float scale = kFolded ? p.scale * kLog2e : p.scale;
    float O[kMmas][kTilesV][4] = {}, row_max[kThreadRows], row_sum[kThreadRows];  // row_max: folded, in powers of two; else natural
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) row_max[r] = -FLT_MAX, row_sum[r] = 0;

    copy_tile<kRows, kD, kStep>(smem.q, q, p.q.row, s.seqlen_q - row0);
    if (kStages == 2 && last_tile >= 0) copy_keys(last_tile, 0);
#pragma unroll 1
    for (int tile = last_tile; tile >= 0; --tile) {
        const int stage = kStages == 2 ? (last_tile - tile) % 2 : 0, key0 = tile * kKeys;
        if (kStages == 1) copy_keys(tile, 0);
        else cp_async_wait_all();
        __syncthreads();  // this tile has arrived; with two stages, all warps have read the previous one
        if (kStages == 2 && tile > 0) copy_keys(tile - 1, stage ^ 1);

        // ---- S = Q K^T ----
        float S[kMmas][kTilesN][4] = {};
#pragma unroll
        for (int step = 0; step < kD / 16; ++step) {
            uint32_t A[kMmas][4];
#pragma unroll
            for (int m = 0; m < kMmas; ++m)
                if constexpr (kSwizzled) ldmatrix_x4(A[m], Tile::advance(q_lane + 16 * m * Tile::kPitch, step));
                else read_a<kD>(A[m], smem.q, warp_row + 16 * m, step, lane);
#pragma unroll
            for (int n = 0; n < kTilesN; n += 2) {
                uint32_t B[2][2];
                if constexpr (kSwizzled) {
                    uint32_t four[4];
                    ldmatrix_x4(four, Tile::advance(k_lane + stage * uint32_t(sizeof smem.k[0]), step) + 8 * n * Tile::kPitch);
                    B[0][0] = four[0], B[0][1] = four[1], B[1][0] = four[2], B[1][1] = four[3];
                } else {
                    read_b<kD>(B, smem.k[stage], 8 * n, step, lane);
                }
#pragma unroll
                for (int m = 0; m < kMmas; ++m)
#pragma unroll
                    for (int t = 0; t < 2; ++t) mma<T>(S[m][n + t], A[m], B[t][0], B[t][1]);
            }
        }
        const int first_row = row0 + warp_row;
        const bool cuts = key0 + kKeys > key_range(p, s, first_row).end;  // the first row of a warp sees the fewest keys
        if (!kFolded || cuts) {
#pragma unroll
            for (int r = 0; r < kThreadRows; ++r) {
                const int end = key_range(p, s, first_row + 16 * (r / 2) + mma_row(lane, r % 2 * 2)).end - key0 - mma_column(lane, 0);
#pragma unroll
                for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        if (8 * n + e >= end) S[r / 2][n][r % 2 * 2 + e] = -INFINITY;
            }
        }

        // ---- the softmax: O and row_sum follow the maximum ----
        float new_max[kThreadRows];
        bool moved = false;
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r) {
            float x = -INFINITY;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n) x = fmaxf(x, fmaxf(S[r / 2][n][r % 2 * 2], S[r / 2][n][r % 2 * 2 + 1]));
            new_max[r] = fmaxf(row_max[r], quad_max(x) * scale);
            moved |= new_max[r] - row_max[r] > 8.0f;
        }
        if (!kFolded || __any_sync(~0u, moved)) {
#pragma unroll
            for (int r = 0; r < kThreadRows; ++r) {
                const float factor = kFolded ? exp2_approx(row_max[r] - new_max[r]) : exp_nonpositive(row_max[r] - new_max[r]);
                row_max[r] = new_max[r], row_sum[r] *= factor;
#pragma unroll
                for (int n = 0; n < kTilesV; ++n) O[r / 2][n][r % 2 * 2] *= factor, O[r / 2][n][r % 2 * 2 + 1] *= factor;
            }
        }
#pragma unroll
        for (int r = 0; r < kThreadRows; ++r)
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = S[r / 2][n][r % 2 * 2 + e];
                    x = kFolded ? exp2_approx(fmaf(x, scale, -row_max[r])) : exp_nonpositive(x * scale - row_max[r]);
                    row_sum[r] += x;
                }

        // ---- O += P V ----
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
            uint32_t A[kMmas][4];
#pragma unroll
            for (int m = 0; m < kMmas; ++m) fragment_of<T>(A[m], &S[m][2 * step]);
#pragma unroll
            for (int n = 0; n < kTilesV / 2; ++n) {
                uint32_t B[2][2];
                if constexpr (kSwizzled)
                    ldmatrix_x4_trans(B, Tile::advance(v_lane + stage * uint32_t(sizeof smem.v[0]), n) + 16 * step * Tile::kPitch);
                else read_b_transposed<kD>(B, smem.v[stage], step, 16 * n, lane);
#pragma unroll
                for (int m = 0; m < kMmas; ++m)
#pragma unroll
                    for (int t = 0; t < 2; ++t) mma<T>(O[m][2 * n + t], A[m], B[t][0], B[t][1]);
            }
        }
        if (kStages == 1) __syncthreads();  // all have read this tile
    }

    // ---- out = O / row_sum; lse ----
    T* out = static_cast<T*>(p.out.data) + s.out + head * p.out.head;
#pragma unroll
    for (int r = 0; r < kThreadRows; ++r) {
        const int i = row0 + warp_row + 16 * (r / 2) + mma_row(lane, r % 2 * 2);
        const RowEnd end = finish_row<kFolded ? ScoreUnit::kLog2 : ScoreUnit::kNatural>(row_max[r], quad_sum(row_sum[r]));
        if (i >= s.seqlen_q) continue;
        if (p.lse && lane % 4 == 0) p.lse[lse_offset(p, s, head) + i] = kFolded ? end.lse * kLn2 : end.lse;
#pragma unroll
        for (int n = 0; n < kTilesV; ++n)
            *reinterpret_cast<uint32_t*>(out + i * p.out.row + 8 * n + mma_column(lane, 0)) =
                pack_16<T>(O[r / 2][n][r % 2 * 2] * end.inverse, O[r / 2][n][r % 2 * 2 + 1] * end.inverse);
    }
}

template <int kD, Step kStep>
void add_step(Variants* variants, const char* what, const char* about) {
    Variant v;
    v.name = std::string("forward_0") + std::to_string(int(kStep)) + "_" + what + "_d" + std::to_string(kD);
    v.experiment = "optimisation", v.kernel = "mma_sm80", v.about = about, v.order = int(kStep), v.headdim = kD;
    v.tile_m = rows_of(kStep), v.tile_n = kKeys, v.stages = stages_of(kStep), v.threads = kThreads;
    v.shared_bytes = sizeof(Smem<kD, kStep>), v.compute = 80;
    v.function = reinterpret_cast<const void*>(climb_kernel<kD, kStep>);
    v.workspace = [](const AttentionParams&, int) -> size_t { return 0; };
    v.launch = [](const AttentionParams& p, int, cudaStream_t stream) {
        const int tiles = (p.seqlen_q + rows_of(kStep) - 1) / rows_of(kStep);
        return launch_kernel(climb_kernel<kD, kStep>, unsigned(tiles * p.nheads * p.batch), kThreads, sizeof(Smem<kD, kStep>), stream, p);
    };
    variants->push_back(std::move(v));
}

template <int kD>
void add_all(Variants* variants) {
    add_step<kD, Step::kTensorCores>(variants, "tensor_cores", "mma.sync in bfloat16; P goes to the second product in registers");
    add_step<kD, Step::kLdmatrix>(variants, "ldmatrix", "swizzled shared memory, ldmatrix: no bank conflicts");
    add_step<kD, Step::kAsync>(variants, "async_copies", "cp.async: the next keys arrive while these are computed");
    add_step<kD, Step::kLazy>(variants, "lazy_rescale",
                              "2^x with the scale folded in, O rescaled after a rise of 2^8, masks where they cut");
    add_step<kD, Step::kTallWarps>(variants, "tall_warps", "32 rows a warp: what ldmatrix reads feeds two mma");
}

}  // namespace

void add_mma_climb_variants(Variants* variants) { add_all<64>(variants), add_all<128>(variants); }

}  // namespace fa
