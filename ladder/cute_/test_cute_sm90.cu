// test_cute_sm90.cu: checks on the host what cute_sm90.cu derives from its types: which TMA box fills which bytes, which elements a thread
// holds, which of them the mask hides, and where stmatrix puts O. Short functions emulate TMA and stmatrix. Needs no GPU. Exit status: 0
// passed, 1 failed.
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL  // make_tma_copy then calls the encoder below

#include "cute_sm90.cu"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "attention/common/mask.h"
#include "device/wgmma.cuh"
#include "expect.h"

// ---- TMA ----

namespace {

struct Map {
    uint16_t* data;
    int rank;
    int64_t dims[5], strides[5];  // of elements
    int box[5];
};
std::vector<Map> maps;  // a CUtensorMap holds an index into it

}  // namespace

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data, const cuuint64_t* dims,
                                           const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                                           CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill fill) {
    EXPECT(interleave == CU_TENSOR_MAP_INTERLEAVE_NONE && swizzle == CU_TENSOR_MAP_SWIZZLE_128B, "swizzle %d", int(swizzle));
    EXPECT(fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE && box[0] == 64, "fill %d, boxes of %u columns", int(fill), box[0]);
    Map m{static_cast<uint16_t*>(data), int(rank), {}, {1}, {}};
    for (int i = 0; i < m.rank; ++i) {
        m.dims[i] = int64_t(dims[i]), m.box[i] = int(box[i]);
        if (i) m.strides[i] = int64_t(strides[i - 1]) / 2;
        EXPECT(steps[i] == 1 && box[i] <= 256 && (!i || strides[i - 1] % 16 == 0), "axis %d", i);
    }
    reinterpret_cast<uint64_t&>(*map) = maps.size();
    maps.push_back(m);
    return CUDA_SUCCESS;
}

namespace {

using namespace fa;

// Moves one box at `coordinate` to or from shared memory in the 128-byte swizzle. Elements out of bounds are read as zero and not written.
template <class Coordinate>
void move_box(const CUtensorMap* map, const Coordinate& coordinate, void* shared, bool load) {
    const Map& m = maps[reinterpret_cast<const uint64_t&>(*map)];
    EXPECT(reinterpret_cast<uintptr_t>(shared) % 1024 == 0, "a box at %p", shared);
    int64_t at[5] = {};
    for_each(make_seq<rank_v<Coordinate>>{}, [&](auto i) { at[i] = get<i>(coordinate); });
    const int count = m.box[0] * m.box[1];
    for (int i = 2; i < m.rank; ++i) EXPECT(m.box[i] == 1, "a box of %d along axis %d", m.box[i], i);
    for (int e = 0; e < count; ++e) {
        const int64_t place[5] = {at[0] + e % m.box[0], at[1] + e / m.box[0], at[2], at[3], at[4]};
        bool inside = true;
        int64_t offset = 0;
        for (int i = 0; i < m.rank; ++i) inside = inside && place[i] >= 0 && place[i] < m.dims[i], offset += place[i] * m.strides[i];
        uintptr_t address = reinterpret_cast<uintptr_t>(shared) + 2 * e;
        address ^= (address >> 7 & 7) << 4;
        uint16_t& element = *reinterpret_cast<uint16_t*>(address);
        if (load) element = inside ? m.data[offset] : 0;
        else if (inside) m.data[offset] = element;
    }
}

// Moves all boxes of one tile, partitioned as in the kernel. `tile` holds coordinates.
enum class Direction { kLoad, kStore };
template <Direction kDirection, class Copy, class Coordinates, class Shared>
void move_tile(const Copy& copy, const Coordinates& tile, const Shared& shared) {
    constexpr bool kLoad = kDirection == Direction::kLoad;
    const auto slice = copy.get_slice(_0{});
    const auto boxes = [&] {
        if constexpr (kLoad) return std::make_pair(slice.partition_S(tile), slice.partition_D(shared));
        else return std::make_pair(slice.partition_D(tile), slice.partition_S(shared));
    }();
    static_assert(size<1>(boxes.first) * size<2>(boxes.first) == 1 && size<0, 1>(boxes.first) == size<0, 1>(boxes.second), "(box, boxes)");
    for (int i = 0; i < size<0, 1>(boxes.first); ++i) {
        const auto coordinates = boxes.first(make_coord(_, i), 0, 0);
        const auto bytes = boxes.second(make_coord(_, i), 0, 0);
        move_box(copy.get_tma_descriptor(), coordinates.data().coord_, raw_pointer_cast(bytes.data()), kLoad);
    }
}

// ---- memory ----

struct Tensor16 {
    std::vector<uint16_t> memory;
    TensorView view;
    Tensor16(int batch, int rows, int heads, int columns, int pad, uint16_t salt) {
        view.head = columns + 8 * pad, view.row = heads * view.head + 16 * pad, view.batch = rows * view.row + 24 * pad;
        memory.assign(size_t(batch * view.batch) + 8, 0xFFFF);
        view.data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 15) / 16 * 16);
        for (size_t i = 0; i < size_t(batch * view.batch); ++i) static_cast<uint16_t*>(view.data)[i] = uint16_t(i * 40503u + salt) | 1;
    }
    uint16_t& at(int b, int r, int h, int c) const {
        return static_cast<uint16_t*>(view.data)[b * view.batch + r * view.row + h * view.head + c];
    }
};

template <class Tile>
struct SharedTile {
    std::unique_ptr<typename Tile::Smem, decltype(&std::free)> memory{
        static_cast<typename Tile::Smem*>(std::aligned_alloc(1024, sizeof(typename Tile::Smem))), &std::free};
    typename Tile::Smem* operator->() const { return memory.get(); }
};
template <class Shared, class... Places>
uint16_t bits(const Shared& shared, Places... places) {
    return shared(places...).storage;
}

// ---- tests ----

// Every tile of Q, K and V must arrive where the layouts of the products expect it, and out must leave from there.
template <class Tile>
void test_copies(int batch, int seqlen_q, int seqlen_k, int nheads, int nheads_k, int pad, bool causal, bool top_left) {
    constexpr int kD = typename Tile::HeadDim{};
    const Tensor16 q(batch, seqlen_q, nheads, kD, pad, 2), k(batch, seqlen_k, nheads_k, kD, pad, 4),
        v(batch, seqlen_k, nheads_k, kD, pad, 6);
    Tensor16 out(batch, seqlen_q, nheads, kD, pad, 8);
    AttentionParams p{};
    p.q = q.view, p.k = k.view, p.v = v.view, p.out = out.view;
    p.batch = batch, p.nheads = nheads, p.nheads_k = nheads_k, p.group = nheads / nheads_k, p.headdim = p.headdim_v = kD;
    p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k, p.scale = 1, p.window_left = -1, p.window_right = causal ? 0 : -1, p.top_left = top_left;
    const CuteCall call = cute_call(p, Tile::kBlockM);
    maps.clear();
    const auto [load_q, load_k, load_v, store_o] = cute_copies<Tile>(p, call);
    EXPECT(maps.size() == 4, "%zu maps", maps.size());

    const SharedTile<Tile> smem;
    const auto shared_q = make_tensor(make_smem_ptr(smem->q), typename Tile::SmemQ{});
    const auto shared_k = make_tensor(make_smem_ptr(smem->k), typename Tile::SmemK{});
    const auto shared_v = make_tensor(make_smem_ptr(smem->v), typename Tile::SmemV{});
    const auto all_q = load_q.get_tma_tensor(make_shape(seqlen_q, Int<kD>{}, nheads, batch));
    const auto all_k = load_k.get_tma_tensor(make_shape(call.keys, Int<kD>{}, nheads_k, batch));
    const auto all_v = load_v.get_tma_tensor(make_shape(Int<kD>{}, call.keys, nheads_k, batch));
    const auto all_out = store_o.get_tma_tensor(make_shape(seqlen_q, Int<kD>{}, nheads, batch));
    for (int index = 0; index < call.m_blocks * nheads * batch; ++index) {
        const CuteItem item = cute_item<Tile::kBlockM, Tile::kBlockN>(call, index);
        const int b = item.batch, head_k = item.head / call.group;
        move_tile<Direction::kLoad>(load_q, local_tile(all_q(_, _, item.head, b), typename Tile::ShapeQ{}, make_coord(item.m, _0{})),
                                    shared_q);
        for (int r = 0; r < Tile::kBlockM; ++r)
            for (int c = 0; c < kD; ++c) {
                const int i = item.row0 + r;
                const uint16_t wanted = i < seqlen_q ? q.at(b, i, item.head, c) : 0;
                EXPECT(bits(shared_q, r, c) == wanted, "q %d: row %d column %d", index, r, c);
            }
        for (int n = 0; n < item.tiles; ++n) {
            const int stage = n % Tile::kStages;
            move_tile<Direction::kLoad>(load_k, local_tile(all_k(_, _, head_k, b), typename Tile::ShapeK{}, make_coord(_, _0{}))(_, _, n),
                                        shared_k(_, _, stage));
            move_tile<Direction::kLoad>(load_v, local_tile(all_v(_, _, head_k, b), typename Tile::ShapeV{}, make_coord(_0{}, _))(_, _, n),
                                        shared_v(_, _, stage));
            for (int r = 0; r < Tile::kBlockN; ++r)
                for (int c = 0; c < kD; ++c) {
                    const int j = n * Tile::kBlockN + r;
                    const bool exists = j < call.keys;
                    EXPECT(bits(shared_k, r, c, stage) == (exists ? k.at(b, j, head_k, c) : 0), "k %d: key %d column %d", index, j, c);
                    EXPECT(bits(shared_v, c, r, stage) == (exists ? v.at(b, j, head_k, c) : 0), "v %d: key %d column %d", index, j, c);
                }
        }
        for (int r = 0; r < Tile::kBlockM; ++r)
            for (int c = 0; c < kD; ++c) shared_q(r, c).storage = uint16_t(2 * (index * 7919 + r * kD + c));
        move_tile<Direction::kStore>(store_o, local_tile(all_out(_, _, item.head, b), typename Tile::ShapeQ{}, make_coord(item.m, _0{})),
                                     shared_q);
    }
    // Checks that all rows of out were written, and nothing between them.
    size_t written = 0;
    for (int index = 0; index < call.m_blocks * nheads * batch; ++index) {
        const CuteItem item = cute_item<Tile::kBlockM, Tile::kBlockN>(call, index);
        for (int r = 0; r < Tile::kBlockM && item.row0 + r < seqlen_q; ++r)
            for (int c = 0; c < kD; ++c, ++written)
                EXPECT(out.at(item.batch, item.row0 + r, item.head, c) == uint16_t(2 * (index * 7919 + r * kD + c)), "out %d: row %d",
                       index, r);
    }
    size_t even = 0;
    for (size_t i = 0; i < size_t(batch * out.view.batch); ++i) even += static_cast<uint16_t*>(out.view.data)[i] % 2 == 0;
    EXPECT(written == size_t(batch) * seqlen_q * nheads * kD && even == written, "%zu elements of out written, not %zu", even, written);
}

// The layouts and the accumulators must match wgmma.cuh. P must be S element by element.
template <class Tile>
void test_fragments() {
    constexpr int kD = typename Tile::HeadDim{};
    const SharedTile<Tile> smem;
    const auto q = make_tensor(make_smem_ptr(smem->q), typename Tile::SmemQ{});
    const auto k = make_tensor(make_smem_ptr(smem->k), typename Tile::SmemK{});
    const auto v = make_tensor(make_smem_ptr(smem->v), typename Tile::SmemV{});
    const auto offset = [](const void* base, const auto& element) {
        return uint32_t(reinterpret_cast<const char*>(&element) - static_cast<const char*>(base));
    };
    for (int r = 0; r < 128; ++r)
        for (int c = 0; c < kD; ++c) {
            const uint32_t wanted = swizzled_offset(128, r, c / 8) + c % 8 * 2;
            EXPECT(offset(smem->q, q(r, c)) == wanted, "q: row %d column %d", r, c);
            EXPECT(offset(smem->k, k(r, c, 1)) == wanted + Tile::kBytesK, "k: row %d column %d", r, c);
            EXPECT(offset(smem->v, v(c, r, 1)) == wanted + Tile::kBytesV, "v: row %d column %d", r, c);
        }
    const auto scores = make_identity_tensor(typename Tile::ShapeS{});
    const auto outputs = make_identity_tensor(typename Tile::ShapeQ{});
    for (int t = 0; t < Tile::kConsumerThreads; ++t) {
        const auto S = typename Tile::MmaQK{}.get_slice(t).partition_C(scores);
        const auto P = typename Tile::MmaPV{}.get_slice(t).partition_A(scores);
        const auto O = typename Tile::MmaPV{}.get_slice(t).partition_C(outputs);
        const int row0 = t / 128 * 64;
        for (int i = 0; i < size(S); ++i) {
            EXPECT(get<0>(S(i)) == row0 + accumulator_row(t % 128, i) && get<1>(S(i)) == accumulator_column(t % 128, i), "S %d of %d", i,
                   t);
            EXPECT(P(i) == S(i), "P %d of thread %d", i, t);
        }
        for (int i = 0; i < size(O); ++i)
            EXPECT(get<0>(O(i)) == row0 + accumulator_row(t % 128, i) && get<1>(O(i)) == accumulator_column(t % 128, i), "O %d of %d", i,
                   t);
        // Register i holds element i, and rows alternate in (row, column): the rescaling of O relies on both.
        const auto fragment = rows_of(partition_fragment_C(typename Tile::MmaPV{}, typename Tile::ShapeQ{})).layout();
        for (int i = 0; i < size(fragment); ++i) EXPECT(fragment(i) / 2 % 2 == i % 2, "element %d of O by rows", i);
    }
}

// Every query block is computed once; its tiles and its mask hide exactly the keys that key_range hides.
template <class Tile>
void test_mask(std::mt19937& random) {
    const auto below = [&](int n) { return int(random() % unsigned(n)); };
    AttentionParams p{};
    p.batch = 1 + below(2), p.nheads_k = 1 + below(2), p.group = 1 + below(2), p.nheads = p.nheads_k * p.group;
    p.seqlen_q = 1 + below(400), p.seqlen_k = 1 + below(500), p.scale = 1;
    p.window_left = -1, p.window_right = below(3) == 0 ? -1 : below(2) ? 0 : below(300), p.top_left = below(2);
    const CuteCall call = cute_call(p, Tile::kBlockM);
    std::vector<int> times(size_t(p.batch) * p.nheads * call.m_blocks);
    for (int index = 0; index < int(times.size()); ++index) {
        const CuteItem item = cute_item<Tile::kBlockM, Tile::kBlockN>(call, index);
        ++times[(size_t(item.batch) * p.nheads + item.head) * call.m_blocks + item.m];
        if (item.head || item.batch) continue;
        const Sequence s = sequence_of(p, 0);
        for (int t = 0; t < Tile::kConsumerThreads; ++t) {
            const CutePlace place = cute_place<Tile>(item, t);
            const auto at = typename Tile::MmaQK{}.get_slice(t).partition_C(make_identity_tensor(typename Tile::ShapeS{}));
            EXPECT((place.key == 0) == (t % 4 == 0), "thread %d writes the lse of its rows", t);
            int seen[2] = {};
            for (int n = 0; n < item.tiles; ++n) {
                auto S = partition_fragment_C(typename Tile::MmaQK{}, typename Tile::ShapeS{});
                fill(S, 1.0f);
                if (n >= item.masked) mask_scores<Tile>(rows_of(S), call, place, n);
                for (int i = 0; i < size(S); ++i) {
                    const int row = item.row0 + get<0>(at(i)), key = n * Tile::kBlockN + get<1>(at(i));
                    EXPECT(row == place.row[i / 2 % 2], "element %d of thread %d", i, t);
                    if (row >= p.seqlen_q) continue;
                    const KeyRange range = key_range(p, s, row);
                    const bool visible = key >= range.begin && key < range.end;
                    EXPECT((S(i) == 1.0f) == visible, "row %d key %d of (%d, %d), right %d", row, key, p.seqlen_q, p.seqlen_k, call.right);
                    seen[i / 2 % 2] += visible;
                }
            }
            for (int r = 0; r < 2; ++r) {
                if (place.row[r] >= p.seqlen_q) continue;
                const KeyRange range = key_range(p, s, place.row[r]);
                int wanted = 0;
                for (int j = range.begin; j < range.end; ++j) wanted += j % 8 / 2 == t % 4;
                EXPECT(seen[r] == wanted, "row %d: thread %d sees %d keys, not %d", place.row[r], t, seen[r], wanted);
            }
        }
        const KeyRange last = key_range(p, s, p.seqlen_q - 1);
        EXPECT(call.keys == std::max(last.end, 1), "keys end at %d, not %d", call.keys, last.end);
    }
    for (size_t i = 0; i < times.size(); ++i) EXPECT(times[i] == 1, "block %zu is computed %d times", i, times[i]);
}

// stmatrix.x4 writes four 8 x 8 matrices: lane 8 j + i gives the address of row i of matrix j, and register j of lane l holds row l / 4,
// columns 2 (l % 4) and the next.
template <class Tile>
void test_store() {
    using Element = typename Tile::Element;
    constexpr int kD = typename Tile::HeadDim{};
    const SharedTile<Tile> smem;
    auto shared = as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(smem->q), typename Tile::SmemQ{}));
    const auto copy = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, typename Tile::MmaPV{});
    const auto outputs = make_identity_tensor(typename Tile::ShapeQ{});
    for (int warp = 0; warp < Tile::kConsumerThreads / 32; ++warp)
        for (int step = 0; step < kD / 16; ++step) {
            uint16_t registers[32][8];  // two per register
            Element* rows[32];
            for (int lane = 0; lane < 32; ++lane) {
                const int t = warp * 32 + lane;
                const auto at = typename Tile::MmaPV{}.get_slice(t).partition_C(outputs);
                auto rounded = make_fragment_like<Element>(partition_fragment_C(typename Tile::MmaPV{}, typename Tile::ShapeQ{}));
                for (int i = 0; i < size(rounded); ++i) rounded(i) = Element::bitcast(uint16_t(get<0>(at(i)) * kD + get<1>(at(i))));
                const auto slice = copy.get_slice(t);
                const auto from = slice.retile_S(rounded);
                auto to = slice.partition_D(shared);
                static_assert(size<0, 0>(from) == 8 && size<0, 1>(from) == kD / 16 && size<1>(from) * size<2>(from) == 1,
                              "an instruction for each 16 columns");
                for (int i = 0; i < 8; ++i) registers[lane][i] = from(make_coord(i, step), 0, 0).storage;
                rows[lane] = &to(make_coord(0, step), 0, 0);
            }
            for (int lane = 0; lane < 32; ++lane)
                for (int i = 0; i < 8; ++i) rows[8 * (i / 2) + lane / 4][2 * (lane % 4) + i % 2].storage = registers[lane][i];
        }
    const auto q = make_tensor(make_smem_ptr(smem->q), typename Tile::SmemQ{});
    for (int r = 0; r < Tile::kBlockM; ++r)
        for (int c = 0; c < kD; ++c) EXPECT(bits(q, r, c) == r * kD + c, "row %d column %d of O is %d", r, c, bits(q, r, c));
}

template <class Tile>
void test_tile(const char* name) {
    const int before = failures;
    test_fragments<Tile>();
    test_store<Tile>();
    test_copies<Tile>(2, 130, 200, 4, 2, 1, false, false);
    test_copies<Tile>(1, 200, 90, 2, 2, 3, true, false);
    test_copies<Tile>(2, 140, 300, 1, 1, 0, true, true);
    test_copies<Tile>(1, 1, 1, 1, 1, 0, true, false);
    std::mt19937 random(1);
    for (int round = 0; round < 25; ++round) test_mask<Tile>(random);
    std::printf("%s: %s\n", name, failures > before ? "FAILED" : "passed");
}

}  // namespace

int main() {
    test_tile<CuteTile<cutlass::half_t, 64>>("headdim 64");
    test_tile<CuteTile<cutlass::bfloat16_t, 128>>("headdim 128");
    return failures ? 1 : 0;
}
