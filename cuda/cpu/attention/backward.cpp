// backward.cpp: the CPU backward pass outside the tile kernel: it divides the work into tiles, hands them to threads and lays
// out their scratch.
//
// One task owns a tile of keys. It accumulates the tile's dK and dV while it walks over the queries of every head that sees the tile, one
// block of queries at a time. The tiles add their parts of a block's dQ in a fixed order; `ready` holds the tile whose turn it is. So every
// sum has one order, whichever thread runs a task and however many threads there are. The workspace holds the scratch of each thread, dQ in
// float32, and a few words per row and per block.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <thread>

#include "attention/common/mask.h"
#include "cpu/attention/backward_tile.h"
#include "cpu/attention/interval_tiles.h"
#include "cpu/attention/kernels.h"
#include "cpu/common/parallel.h"

namespace fa::cpu {
namespace {

const BackwardTileKernel& tile_kernel(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::kAvx512) return kBackwardTileAvx512;
    if (isa == Isa::kAvx2) return kBackwardTileAvx2;
#elif defined(__aarch64__)
    if (isa == Isa::kNeon) return kBackwardTileNeon;
#endif
    (void)isa;
    return kBackwardTilePortable;
}

// Sizes of the parts of the workspace, in floats; each is a whole number of cache lines.
constexpr int64_t kLine = 64 / sizeof(float);
int64_t lines(int64_t floats) { return (floats + kLine - 1) / kLine * kLine; }

int64_t blocks_of(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

// Keys per tile. With more keys, Q and dO are read less often and dQ is added to less often. The five matrices of the tile should take
// at most half of a usual L2 cache, and calls of few heads should have tiles for many threads. The sums depend on the tiles, so the choice
// must not depend on the number of threads, on the batch, or on the longest sequence. Measured with AVX-512 on 2048 keys, headdim 128: 256
// keys are 15 % faster than 64, and 512 are no faster than 256.
int32_t tile_keys(const AttentionParams& p) {
    constexpr int kHeads = 4;  // with so many key heads tiles have as many keys as they should
    const int64_t fit = (int64_t(3) << 16) / (3 * p.headdim + 2 * p.headdim_v);
    const int64_t share = std::max<int64_t>(int64_t(kMaxTileKeys) * p.nheads_k / kHeads, kMaxTileKeys / 2);
    return int32_t(std::clamp<int64_t>(std::min(fit, share) / kPanelKeys * kPanelKeys, kPanelKeys, kMaxTileKeys));
}

// Each thread should get at least `nanoseconds` of work. Two vectors of multiply-adds per nanosecond are modest. With few queries the time
// goes into reading K and V and writing their gradients: half a nanosecond for an element of each, here as multiply-adds.
int useful_threads(const AttentionParams& p, const BackwardTileKernel& kernel, double nanoseconds) {
    double keys = p.seqlen_k;
    if (p.window_left >= 0 && p.window_right >= 0) keys = std::min(keys, double(p.window_left) + p.window_right + 1);
    const double products = double(p.nheads) * p.seqlen_q * (3 * p.headdim + 2 * p.headdim_v);
    const double elements = double(p.nheads_k) * (p.headdim + p.headdim_v) * kernel.lanes;
    return int(std::clamp(p.batch * keys * (products + elements) / (nanoseconds * 2 * kernel.lanes), 1.0, double(p.num_threads)));
}

// The tiles of keys that a block of queries sees lie in first .. end - 1; they see both of these. `turn` is the tile that adds to dQ next.
struct BlockOrder {
    std::atomic<int32_t> turn;
    int32_t first, end;
};
static_assert(sizeof(BlockOrder) == 3 * sizeof(float) && std::is_trivially_destructible_v<BlockOrder>, "lives in the workspace");

struct Layout {
    int64_t ld_k, ld_v, ld_dq;
    int64_t tile;                                                              // in keys
    int64_t matrix_k, matrix_v, matrix_kv_t, block_k, block_v, panel, thread;  // sizes: floats in a thread's scratch
    int64_t most_few_rows;                                                     // see kFewRows
    int64_t rows, blocks;                                                      // query rows and blocks of the whole call
    int64_t delta, dq, ready, bounds, total;                                   // sizes in floats; row_max and log_sum are as large as delta
    int threads;                                                               // at most
    Layout(const BackwardParams& b, const BackwardTileKernel& kernel) {
        const AttentionParams& p = b.forward;
        // Each row has one cache line more than it needs: with rows a power of two apart, a column would use only a few sets of the cache.
        ld_dq = lines(p.headdim), ld_k = ld_dq + kLine, ld_v = lines(p.headdim_v) + kLine;
        tile = tile_keys(p);
        matrix_k = ld_k * tile, matrix_v = ld_v * tile;
        block_k = ld_k * kBlockRows, block_v = ld_v * kBlockRows, panel = kBlockRows * kPanelKeys;
        most_few_rows = p.dtype != DType::kFloat32 ? kFewRows : kernel.lanes < 16 ? kFewRowsInPlace : kFewWideRowsInPlace;
        // K^T and V^T, or V of a sequence with few rows
        const bool all_few = int64_t(p.seqlen_q) * p.group <= most_few_rows, some_few = all_few || p.cu_seqlens_q;
        matrix_kv_t = std::max(all_few ? 0 : tile * (p.headdim + p.headdim_v), some_few ? matrix_v : 0);
        thread = 2 * matrix_k + matrix_v + matrix_kv_t + 2 * block_k + block_v + 2 * panel;

        rows = p.nheads * (p.cu_seqlens_q ? p.total_q : int64_t(p.batch) * p.seqlen_q);
        blocks = p.nheads * (p.cu_seqlens_q ? p.total_q / kBlockRows + p.batch : p.batch * blocks_of(p.seqlen_q));
        delta = lines(rows);
        dq = p.seqlen_k > tile ? rows * ld_dq : 0;  // a single tile needs no sum over tiles
        ready = lines(blocks * int64_t(sizeof(BlockOrder) / sizeof(float)));
        bounds = lines(IntervalTiles::size(p, kPanelKeys));
        threads = useful_threads(p, kernel, kOpenMpNanoseconds);
        total = 3 * delta + dq + ready + bounds + threads * thread;
    }
};

struct Backward {
    const BackwardParams& b;
    const AttentionParams& p;
    const BackwardTileKernel& kernel;
    const Layout layout;
    float *const delta, *const row_max, *const log_sum, *const dq_sum;
    BlockOrder* const ready;
    const IntervalTiles intervals;  // tiles of kPanelKeys keys
    float* const scratch;

    Backward(const BackwardParams& params, const BackwardTileKernel& tile_kernel)
        : b(params),
          p(params.forward),
          kernel(tile_kernel),
          layout(params, tile_kernel),
          delta(static_cast<float*>(align_up(p.workspace, 64))),
          row_max(delta + layout.delta),
          log_sum(row_max + layout.delta),
          dq_sum(log_sum + layout.delta),
          ready(reinterpret_cast<BlockOrder*>(dq_sum + layout.dq)),
          intervals(p, kPanelKeys, dq_sum + layout.dq + layout.ready),
          scratch(dq_sum + layout.dq + layout.ready + layout.bounds) {}

    // ---- the blocks of queries ----

    // Sequences of a varlen batch start at any row, so each sequence has room for one extra block.
    BlockOrder& order_of(const Sequence& s, int32_t batch, int32_t head, int32_t block) const {
        const int64_t in_head = p.cu_seqlens_q ? s.lse / kBlockRows + batch : batch * blocks_of(p.seqlen_q);
        return ready[head * (layout.blocks / p.nheads) + in_head + block];
    }

    // The range of tiles that some row of the block may see.
    KeyRange tiles_of(const Sequence& s, int32_t batch, int32_t head, int32_t block) const {
        const int32_t first = block * kBlockRows, last = std::min(first + kBlockRows, s.seqlen_q) - 1;
        const int32_t begin = key_range(p, s, first).begin, end = key_range(p, s, last).end, tile = int32_t(layout.tile);
        KeyRange tiles = begin < end ? KeyRange{begin / tile, (end - 1) / tile + 1} : KeyRange{0, 0};
        while (tiles.begin < tiles.end && !sees(s, batch, head, block, tiles.begin)) ++tiles.begin;
        while (tiles.begin < tiles.end && !sees(s, batch, head, block, tiles.end - 1)) --tiles.end;
        return tiles;
    }
    // Whether masks by intervals and by blocks let some row of the block see some key of the tile.
    bool sees(const Sequence& s, int32_t batch, int32_t head, int32_t block, int32_t tile) const {
        if (!p.hides_tiles()) return true;
        const HiddenBounds* const panels = intervals.of(batch, head);
        const int32_t first = block * kBlockRows, last = std::min(first + kBlockRows, s.seqlen_q) - 1;
        const int32_t begin = tile * int32_t(layout.tile), end = std::min(begin + int32_t(layout.tile), s.seqlen_k);
        const BlockRows rows{p, batch, head, first, last};
        for (int32_t panel = begin / kPanelKeys; panel * kPanelKeys < end; ++panel) {
            if (panels && panels[panel].seen_by(first, last) == Seen::kNothing) continue;
            const int32_t key = panel * kPanelKeys;  // the panel lies in one block of keys
            if (!p.blocks.data || rows.of_keys(key, key + 1) != Seen::kNothing) return true;
        }
        return false;
    }

    // Computes delta and the statistics of a block, and gives the first turn to the block's first tile. If the block sees no key, its
    // gradient is zero.
    void start_block(int32_t batch, int32_t head, int32_t block, float* at) const {
        const Sequence s = sequence_of(p, batch);
        const int32_t first = block * kBlockRows, rows = std::min(kBlockRows, s.seqlen_q - first);
        if (rows <= 0) return;
        const GradientSequence g = gradients_of(b, batch);
        const int64_t own = lse_offset(p, s, head) + first;
        kernel.delta(b, s.out + head * p.out.head + first * p.out.row, g.dout + head * b.dout.head + first * b.dout.row, rows, delta + own);
        for (int32_t i = 0; b.dlse && i < rows; ++i) delta[own + i] -= b.dlse[own + i];
        const KeyRange tiles = tiles_of(s, batch, head, block);
        bool any_large = false;
        for (int32_t i = 0; i < rows; ++i) row_max[own + i] = p.lse[own + i], log_sum[own + i] = 0, any_large |= is_large(p.lse[own + i]);
        if (any_large) part_statistics(s, batch, head, block, tiles, at);
        new (&order_of(s, batch, head, block)) BlockOrder{tiles.begin, tiles.begin, tiles.end};
        if (tiles.begin < tiles.end) return;
        std::fill_n(at, layout.block_k, 0.0f);
        store_dq(s, g, head, first, rows, at);
    }

    // Computes row_max and log_sum of the block's rows with a large lse, from the same S as add_block.
    void part_statistics(const Sequence& s, int32_t batch, int32_t head, int32_t block, const KeyRange& tiles, float* at) const {
        const float sink = p.sinks ? p.sinks[head] : -INFINITY;
        float max[kBlockRows], sum[kBlockRows];
        std::fill_n(max, kBlockRows, sink), std::fill_n(sum, kBlockRows, sink == -INFINITY ? 0.0f : 1.0f);
        QueryBlock q;
        for (int32_t tile = tiles.begin; tile < tiles.end; ++tile) {
            if (!sees(s, batch, head, block, tile)) continue;
            KeyTile t = key_tile(s, batch, head / p.group, tile, at);
            kernel.load_keys(t, false);
            find_rows(t, q, head, block);
            kernel.sum_rows(t, q, max, sum);
        }
        const int64_t own = lse_offset(p, s, head) + block * kBlockRows;
        for (int32_t i = 0; tiles.begin < tiles.end && i < q.rows; ++i) {
            if (!is_large(p.lse[own + i])) continue;
            const RowStatistics row = apart(p.lse[own + i], max[i], sum[i]);
            row_max[own + i] = row.row_max, log_sum[own + i] = row.log_sum;
        }
    }

    void store_dq(const Sequence& s, const GradientSequence& g, int32_t head, int32_t first, int32_t rows, float* dq) const {
        kernel.store_rows(b.dq, g.dq + head * b.dq.head + first * b.dq.row, p.dtype, rows, p.headdim, {dq, layout.ld_k}, scale(s),
                          b.accumulate);
    }
    bool has_few_rows(const Sequence& s) const { return int64_t(s.seqlen_q) * p.group <= layout.most_few_rows; }
    // What is left to multiply dQ and dK by; with few rows add_block has done so.
    float scale(const Sequence& s) const { return has_few_rows(s) ? 1 : p.scale; }

    // ---- the tiles of keys ----

    float* scratch_of(int thread) const { return scratch + thread * layout.thread; }

    KeyTile key_tile(const Sequence& s, int32_t batch, int32_t head_k, int32_t tile, float* at) const {
        KeyTile t;
        t.params = &b, t.sequence = s, t.origin = dropout_origin(p, batch), t.gradients = gradients_of(b, batch);
        t.batch = batch, t.head_k = head_k;
        t.first = tile * int32_t(layout.tile), t.keys = std::min(int32_t(layout.tile), s.seqlen_k - t.first);
        t.few_rows = has_few_rows(s);
        t.ld_k = layout.ld_k, t.ld_v = layout.ld_v;
        t.k = {at, t.ld_k}, t.dk = {at + layout.matrix_k, t.ld_k}, t.dv = {at + 2 * layout.matrix_k, t.ld_v};
        t.k_t = t.dv.data + layout.matrix_v, t.v_t = t.k_t + layout.tile * p.headdim;
        t.v = {t.few_rows ? t.k_t : t.dv.data, t.ld_v};
        return t;
    }

    void find_rows(const KeyTile& t, QueryBlock& q, int32_t head, int32_t block) const {
        const int64_t offset = lse_offset(p, t.sequence, head);
        q.head = head, q.first = block * kBlockRows, q.rows = std::min(kBlockRows, t.sequence.seqlen_q - q.first);
        const float* const lse = p.lse + offset + q.first;
        q.row_max = row_max + offset + q.first, q.log_sum = log_sum + offset + q.first, q.delta = delta + offset + q.first;
        q.q = t.k_t + layout.matrix_kv_t, q.dq = q.q + layout.block_k, q.dout = q.dq + layout.block_k;
        q.p = q.dout + layout.block_v, q.ds = q.p + layout.panel;
        q.next = std::max(q.first - kBlockRows, 0), q.next_rows = q.first - q.next;
        q.next_dq = layout.dq ? dq_sum + (offset + q.next) * layout.ld_dq : nullptr, q.next_ld = layout.ld_dq;
        const HiddenBounds* const panels = intervals.of(t.batch, head);
        q.bounds = panels ? panels + t.first / kPanelKeys : nullptr;
        for (int32_t i = 0; i < q.rows; ++i) {
            const KeyRange range = key_range(p, t.sequence, q.first + i);
            q.begin[i] = range.begin, q.end[i] = lse[i] == -INFINITY ? range.begin : range.end;
        }
    }

    // Calls body(block, order) for each block of a head that sees the tile, the last block first. In this order a causal tile never waits
    // for a tile that has more work.
    template <typename Body>
    void for_blocks(const Sequence& s, int32_t batch, int32_t head, int32_t tile, const Body& body) const {
        for (int32_t block = int32_t(blocks_of(s.seqlen_q)) - 1; block >= 0; --block) {
            BlockOrder& order = order_of(s, batch, head, block);
            if (tile >= order.first && tile < order.end && sees(s, batch, head, block, tile)) body(block, order);
        }
    }

    // Computes dK and dV of a tile, and the tile's part of dQ.
    void add_tile(int32_t batch, int32_t head_k, int32_t tile, int thread) const {
        const Sequence s = sequence_of(p, batch);
        if (tile >= (s.seqlen_k + layout.tile - 1) / layout.tile) return;  // a shorter sequence of a varlen batch
        KeyTile t = key_tile(s, batch, head_k, tile, scratch_of(thread));
        kernel.load_keys(t, true);
        for (int32_t head = head_k * p.group; head < (head_k + 1) * p.group; ++head)
            for_blocks(s, batch, head, tile, [&](int32_t block, BlockOrder& order) {
                QueryBlock q;
                find_rows(t, q, head, block);
                kernel.add_block(t, q);
                add_dq(t, q, order, tile, block);
            });
        kernel.store_rows(b.dk, t.gradients.dk + head_k * b.dk.head + t.first * b.dk.row, p.dtype, t.keys, p.headdim, t.dk, scale(s),
                          b.accumulate);
        kernel.store_rows(b.dv, t.gradients.dv + head_k * b.dv.head + t.first * b.dv.row, p.dtype, t.keys, p.headdim_v, t.dv, 1,
                          b.accumulate);
    }

    // Waits for this tile's turn, then adds its part of dQ. The previous tile started earlier, so the turn will come.
    void add_dq(const KeyTile& t, const QueryBlock& q, BlockOrder& order, int32_t tile, int32_t block) const {
        while (order.turn.load(std::memory_order_acquire) != tile) std::this_thread::yield();
        float* sum = dq_sum + (lse_offset(p, t.sequence, q.head) + q.first) * layout.ld_dq;
        if (tile == order.end - 1) {
            for (int32_t i = 0; tile > order.first && i < q.rows; ++i)
                for (int32_t d = 0; d < layout.ld_dq; ++d) q.dq[i * layout.ld_k + d] += sum[i * layout.ld_dq + d];
            store_dq(t.sequence, t.gradients, q.head, q.first, q.rows, q.dq);
            return;
        }
        for (int32_t i = 0; i < q.rows; ++i, sum += layout.ld_dq) {
            const float* const part = q.dq + i * layout.ld_k;
            if (tile == order.first) std::copy_n(part, layout.ld_dq, sum);
            else
                for (int32_t d = 0; d < layout.ld_dq; ++d) sum[d] += part[d];
        }
        int32_t next = tile + 1;
        while (!sees(t.sequence, t.batch, q.head, block, next)) ++next;  // the block sees tile end - 1
        order.turn.store(next, std::memory_order_release);
    }

    // ---- the gradients of bias and sinks ----

    // One tile of columns of dbias, for one batch entry and head of dbias. All parts are added in a fixed order.
    void add_bias_tile(int32_t own_batch, int32_t own_head, int32_t tile, int thread) const {
        const ScoreGradient& g = b.dbias;
        const int32_t first = tile * int32_t(layout.tile), columns = std::min(int32_t(layout.tile), p.seqlen_k - first);
        float* const dbias = g.data + own_batch * g.batch + own_head * g.head + first;
        if (!b.accumulate)
            for (int32_t i = 0; i < (g.row ? p.seqlen_q : 1); ++i) std::fill_n(dbias + i * g.row, columns, 0.0f);
        for (int32_t batch = own_batch; batch < (g.batch ? own_batch + 1 : p.batch); ++batch) {
            const Sequence s = sequence_of(p, batch);
            if (first >= s.seqlen_k) continue;
            for (int32_t head = own_head; head < (g.head ? own_head + 1 : p.nheads); ++head) {
                KeyTile t = key_tile(s, batch, head / p.group, tile, scratch_of(thread));
                kernel.load_keys(t, false);
                for_blocks(s, batch, head, tile, [&](int32_t block, const BlockOrder&) {
                    QueryBlock q;
                    find_rows(t, q, head, block);
                    kernel.add_bias(t, q, dbias + q.first * g.row, g.row);
                });
            }
        }
    }

    // In every row the probability of the sink has the gradient -delta, like a key whose value is zero.
    void add_sink(int32_t head) const {
        double sum = 0;
        for (int32_t batch = 0; batch < p.batch; ++batch) {
            const Sequence s = sequence_of(p, batch);
            const int64_t offset = lse_offset(p, s, head);
            for (int64_t i = offset; i < offset + s.seqlen_q; ++i)
                if (p.lse[i] != -INFINITY && p.sinks[head] != -INFINITY)
                    sum -= probability(p.sinks[head], {row_max[i], log_sum[i]}) * delta[i];
        }
        b.dsinks[head] = float(sum) + (b.accumulate ? b.dsinks[head] : 0);
    }

    // ---- everything ----

    void run() const {
        // Starting threads of our own is worth a quarter of a millisecond of work.
        const int threads = uses_openmp() ? layout.threads : std::min(layout.threads, useful_threads(p, kernel, 250e3));
        const int64_t blocks = blocks_of(p.seqlen_q), tiles = (p.seqlen_k + layout.tile - 1) / layout.tile;
        intervals.fill(threads);
        parallel_for(p.batch * p.nheads * blocks, threads, [&](int64_t task, int thread) {
            const int64_t head = task / blocks;
            start_block(int32_t(head / p.nheads), int32_t(head % p.nheads), int32_t(task % blocks), scratch_of(thread));
        });
        // Processes as many heads at a time as there are threads: first the first tiles of all these heads, then the second tiles, and so
        // on. Then few tiles wait for their turn.
        // With few queries the keys and their gradients are nearly all that is read and written. Heads lie beside each other in memory, so
        // the same tile of all heads of a sequence comes first: it has the same pages.
        const int64_t heads = int64_t(p.batch) * p.nheads_k;
        const int64_t together = p.seqlen_q <= kBlockRows && p.nheads_k >= threads ? p.nheads_k : std::min<int64_t>(threads, heads);
        parallel_for(heads * tiles, threads, [&](int64_t task, int thread) {
            const int64_t first = task / (together * tiles) * together, width = std::min(together, heads - first);
            const int64_t within = task - first * tiles, head = first + within % width;
            add_tile(int32_t(head / p.nheads_k), int32_t(head % p.nheads_k), int32_t(within / width), thread);
        });
        if (b.dbias.data) {
            const int64_t own_heads = b.dbias.head ? p.nheads : 1, own = (b.dbias.batch ? p.batch : 1) * own_heads;
            parallel_for(own * tiles, threads, [&](int64_t task, int thread) {
                const int64_t head = task / tiles;
                add_bias_tile(int32_t(head / own_heads), int32_t(head % own_heads), int32_t(task % tiles), thread);
            });
        }
        if (b.dsinks) parallel_for(p.nheads, threads, [&](int64_t head, int) { add_sink(int32_t(head)); });
    }
};

}  // namespace

size_t backward_workspace(const BackwardParams& b, Isa isa) { return size_t(Layout(b, tile_kernel(isa)).total) * sizeof(float) + 64; }

void backward(const BackwardParams& b, Isa isa) { Backward(b, tile_kernel(isa)).run(); }

}  // namespace fa::cpu
