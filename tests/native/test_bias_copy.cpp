// test_bias_copy.cpp: the copy of a bias, of a mask of pairs or of both for Hopper's plans with a bias, element by element, for random
// shapes, strides and alignments; and which calls get one. The kernel is written again here, but what a thread does is that of
// attention/common/bias_chunk.h, which is plain C++.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "attention/backward/wgmma_sm90/plan.h"
#include "attention/common/batch_piece.h"
#include "attention/common/bias_chunk.h"
#include "attention/forward/wgmma_sm90/plan.h"
#include "expect.h"
#include "random_calls.h"

namespace {

using namespace fa;
using namespace random_calls;

template <typename Element>
struct Source {
    std::vector<Element> memory;
    ScoreView view{};
};
// Rows of `columns` elements, some axes shared, from any element of the memory on. Before, after and between rows stands `poison`.
template <typename Element, typename Make>
Source<Element> make_source(const AttentionParams& p, Element poison, const Make& make) {
    Source<Element> source;
    const int64_t first = below(9), row = p.seqlen_k + below(10);
    const int64_t rows = below(3) ? p.seqlen_q : 1, heads = below(2) ? p.nheads : 1, batches = below(2) ? p.batch : 1;
    source.memory.assign(size_t(first + row * rows * heads * batches + 9), poison);
    for (int64_t x = 0; x < rows * heads * batches; ++x)
        for (int64_t j = 0; j < p.seqlen_k; ++j) source.memory[size_t(first + x * row + j)] = make();
    source.view = {source.memory.data() + first, batches > 1 ? row * rows * heads : 0, heads > 1 ? row * rows : 0, rows > 1 ? row : 0};
    return source;
}
template <typename Element>
Element element_of(const ScoreView& view, int b, int h, int i, int j) {
    return static_cast<const Element*>(view.data)[b * view.batch + h * view.head + i * view.row + j];
}

// Element: uint16_t, or uint32_t for float32.
template <typename Element>
void check_copy() {
    AttentionParams p{};
    p.batch = 1 + below(3), p.nheads = 1 + below(3), p.seqlen_q = 1 + below(9), p.seqlen_k = 1 + below(40);
    p.dtype = below(2) ? DType::kFloat16 : DType::kBFloat16, p.bias_dtype = sizeof(Element) == 4 ? DType::kFloat32 : p.dtype;
    constexpr Element kPoison = 0x7FFF;
    const auto bias = make_source<Element>(p, kPoison, [] { return Element(below(1 << 14) * 0x10001); });
    const auto mask = make_source<uint8_t>(p, 1, [] { return uint8_t(below(2) << below(8)); });
    const bool alone = below(3) == 0;  // the mask
    if (!alone) p.bias = bias.view;
    const bool masked = alone || below(2);
    if (masked) p.mask = mask.view;
    const BiasCopy copy = bias_copy(p, masked);
    std::vector<BiasChunk> to(size_t(copy.bytes()) / sizeof(BiasChunk));
    std::memset(to.data(), 0xAB, to.size() * sizeof(BiasChunk));  // what no thread writes
    const int threads = int(bias_copy_threads(copy));
    EXPECT(size_t(threads) * sequences_of_bias(copy) == to.size(), "%d threads for %zu chunks", threads, to.size());
    for (int thread = 0; thread < threads + 3; ++thread) copy_bias_chunk(copy, bias_copy_work(copy), thread, to.data());
    const AttentionParams after = with_bias_copy(p, copy, to.data());
    const bool wide = sizeof(Element) == 4 && !alone;  // a mask alone has the dtype of q
    EXPECT(!after.mask.data && after.bias_dtype == (wide ? DType::kFloat32 : p.dtype), "the mask is in the copy");
    EXPECT(bias_has_tiles(with_bias_copy(p, copy)), "rows of %d keys", p.seqlen_k);
    const uint32_t hidden = wide ? 0xFF800000u : p.dtype == DType::kFloat16 ? 0xFC00 : 0xFF80;
    for (int b = 0; b < p.batch; ++b)
        for (int h = 0; h < p.nheads; ++h)
            for (int i = 0; i < p.seqlen_q; ++i)
                for (int j = 0; j < copy.chunks() * copy.elements; ++j) {
                    uint32_t wanted = 0;
                    if (j < p.seqlen_k && masked && !element_of<uint8_t>(p.mask, b, h, i, j)) wanted = hidden;
                    else if (j < p.seqlen_k && !alone) wanted = element_of<Element>(p.bias, b, h, i, j);
                    const uint32_t got = wide ? element_of<uint32_t>(after.bias, b, h, i, j) : element_of<uint16_t>(after.bias, b, h, i, j);
                    EXPECT(got == wanted, "element (%d, %d, %d, %d) of %d keys is %x, not %x", b, h, i, j, p.seqlen_k, got, wanted);
                }
}

// Which calls get a copy, in both passes.
void check_choices() {
    static const uint8_t mask[1] = {};
    static const int32_t lengths[] = {0, 1};
    const auto expect = [](const char* what, bool wanted, const auto& change) {
        for (const int headdim : {40, 64, 128, 192, 256}) {
            AttentionParams p{};
            p.batch = 2, p.nheads = p.nheads_k = 4, p.group = 1, p.headdim = p.headdim_v = headdim, p.seqlen_q = p.seqlen_k = 1001;
            p.scale = 0.125f, p.window_left = p.window_right = -1, p.dtype = p.bias_dtype = DType::kBFloat16;
            p.bias = {reinterpret_cast<const void*>(uintptr_t(4096)), 0, 0, 1001};
            change(p);
            const bool forward = wgmma_plan(wgmma_choose(p, 132)).bias && wgmma_copies_bias(p);
            const bool backward = backward_plan(backward_choose(p)).bias() && backward_copies_bias(p);
            EXPECT(forward == wanted && backward == wanted, "head dim %d, %s: forward %d, backward %d", headdim, what, forward, backward);
        }
    };
    expect("rows of 1001", true, [](AttentionParams&) {});
    expect("rows of 1008", false, [](AttentionParams& p) { p.bias.row = 1008; });
    expect("any address", true,
           [](AttentionParams& p) { p.bias.row = 1008, p.bias.data = reinterpret_cast<const void*>(uintptr_t(4098)); });
    expect("rows of 1008 and a mask of pairs", true, [](AttentionParams& p) { p.bias.row = 1008, p.mask = {mask, 0, 0, 1001}; });
    expect("rows of 1008 and a mask of keys", false, [](AttentionParams& p) { p.bias.row = 1008, p.mask = {mask, 1001, 0, 0}; });
    expect("rows of 1001 and a mask of keys", true, [](AttentionParams& p) { p.mask = {mask, 1001, 0, 0}; });
    expect("a bias of keys", true, [](AttentionParams& p) { p.bias = {reinterpret_cast<const void*>(uintptr_t(4098)), 1001, 0, 0}; });
    expect("causal", true, [](AttentionParams& p) { p.window_right = 0; });
    expect("own for every head, causal", true, [](AttentionParams& p) { p.bias.head = 1001 * 1001, p.bias.batch = 4 * 1001 * 1001; });
    expect("own for every head, in a narrow window", false,
           [](AttentionParams& p) { p.bias.head = 1001 * 1001, p.bias.batch = 4 * 1001 * 1001, p.window_left = 100, p.window_right = 0; });
    expect("packed sequences that are short", false, [](AttentionParams& p) {
        p.bias.head = 1001 * 1001, p.bias.batch = 4 * 1001 * 1001;
        p.cu_seqlens_q = p.cu_seqlens_k = lengths, p.total_q = p.total_k = 600;
    });
    expect("packed sequences", true, [](AttentionParams& p) {
        p.bias.head = 1001 * 1001, p.bias.batch = 4 * 1001 * 1001;
        p.cu_seqlens_q = p.cu_seqlens_k = lengths, p.total_q = p.total_k = 1900;
    });
    expect("301 rows", true, [](AttentionParams& p) { p.seqlen_q = p.seqlen_k = p.bias.row = 301; });
    expect("a short call", false, [](AttentionParams& p) { p.seqlen_q = p.seqlen_k = p.bias.row = 61; });
    expect("1.2 GiB", true, [](AttentionParams& p) { p.batch = 160, p.bias.head = 1001 * 1001, p.bias.batch = 4 * 1001 * 1001; });
    expect("300 MiB from a mask of sequences and a bias of heads", true,
           [](AttentionParams& p) { p.batch = 40, p.bias.head = 1001 * 1001, p.mask = {mask, 1001 * 1001, 0, 1001}; });
    // In pieces.
    expect("1.2 GiB from a mask of sequences and a bias of heads", true,
           [](AttentionParams& p) { p.batch = 160, p.bias.head = 1001 * 1001, p.mask = {mask, 1001 * 1001, 0, 1001}; });
    expect("1.9 GiB from rows that overlap", true, [](AttentionParams& p) { p.batch = 1000, p.bias.row = 1, p.bias.batch = 2001; });
    expect("5 GiB", true, [](AttentionParams& p) { p.batch = 700, p.bias.head = 1001 * 1001, p.bias.batch = 4 * 1001 * 1001; });
    expect("1.2 GiB in packed sequences", false, [](AttentionParams& p) {
        p.batch = 160, p.bias.head = 1001 * 1001, p.mask = {mask, 1001 * 1001, 0, 1001};
        p.cu_seqlens_q = p.cu_seqlens_k = lengths, p.total_q = p.total_k = 160 * 1001;
    });
    expect("1.2 GiB with dropout", false, [](AttentionParams& p) {
        p.batch = 160, p.bias.head = 1001 * 1001, p.mask = {mask, 1001 * 1001, 0, 1001}, p.dropout_threshold = 9;
    });
    expect("1.1 GiB of each sequence", false,
           [](AttentionParams& p) { p.nheads = p.nheads_k = 600, p.bias.head = 1001 * 1001, p.mask = {mask, 1001 * 1001, 0, 1001}; });
    expect("float32, rows of 1001", true, [](AttentionParams& p) { p.bias_dtype = DType::kFloat32; });
    expect("float32, rows of 1004", false, [](AttentionParams& p) { p.bias_dtype = DType::kFloat32, p.bias.row = 1004; });
    expect("float32 and a mask of pairs", true,
           [](AttentionParams& p) { p.bias_dtype = DType::kFloat32, p.bias.row = 1004, p.mask = {mask, 0, 0, 1001}; });
    expect("float32 and dropout", true, [](AttentionParams& p) { p.bias_dtype = DType::kFloat32, p.dropout_threshold = 9; });
    expect("dropout", true, [](AttentionParams& p) { p.dropout_threshold = 9; });
    expect("a scale below zero", true, [](AttentionParams& p) { p.scale = -1; });
    expect("softcap below zero scale", false, [](AttentionParams& p) { p.softcap = 50, p.scale = -1; });
    const auto of_pairs = [](AttentionParams& p) { p.bias.data = nullptr, p.mask = {mask, 0, 0, 1001}; };
    expect("a mask of pairs", false, of_pairs);  // the plans for masks serve it
    expect("a mask of pairs and dropout", true, [&](AttentionParams& p) { of_pairs(p), p.dropout_threshold = 9; });
    expect("the same, with a dtype for the bias that is not there", true,
           [&](AttentionParams& p) { of_pairs(p), p.dropout_threshold = 9, p.bias_dtype = DType::kFloat32; });
    expect("a mask of pairs, dropout and a window", true,
           [&](AttentionParams& p) { of_pairs(p), p.dropout_threshold = 9, p.window_left = 700, p.window_right = 0; });
    expect("a mask of pairs and dropout, own for every sequence", true,
           [&](AttentionParams& p) { of_pairs(p), p.dropout_threshold = 9, p.mask.batch = 1001 * 1001; });
    expect("a mask of pairs and more dropout than these plans take", false,
           [&](AttentionParams& p) { of_pairs(p), p.dropout_threshold = 255; });
    expect("a mask of pairs in packed sequences", true,
           [&](AttentionParams& p) { of_pairs(p), p.cu_seqlens_q = p.cu_seqlens_k = lengths, p.total_q = p.total_k = 1900; });
    expect("a mask of pairs and a scale below zero", true, [&](AttentionParams& p) { of_pairs(p), p.scale = -1; });
    expect("a mask of keys and dropout", false,
           [](AttentionParams& p) { p.bias.data = nullptr, p.mask = {mask, 1001, 0, 0}, p.dropout_threshold = 9; });
    expect("dropout alone", false, [](AttentionParams& p) { p.bias.data = nullptr, p.dropout_threshold = 9; });
    expect("no keys", false, [](AttentionParams& p) { p.seqlen_k = 0; });
}

// A call in pieces: each has a copy that fits, they are all of the call, and their pointers are those of the call's elements.
void check_pieces() {
    for (int trial = 0; trial < 300; ++trial) {
        static uint8_t memory[1] = {};
        AttentionParams p{};
        p.batch = 2 + below(60), p.nheads = p.nheads_k = 1 + below(40), p.group = 1, p.headdim = p.headdim_v = 64;
        p.seqlen_q = 500 + below(4000), p.seqlen_k = 500 + below(4000);
        p.scale = 0.125f, p.window_left = p.window_right = -1, p.dtype = p.out_dtype = DType::kBFloat16;
        p.bias_dtype = below(2) ? DType::kBFloat16 : DType::kFloat32;
        const int64_t pairs = int64_t(p.seqlen_q) * p.seqlen_k;
        p.bias = {memory, 0, pairs, p.seqlen_k}, p.mask = {memory, pairs, 0, p.seqlen_k};
        for (TensorView* const x : {&p.q, &p.k, &p.v, &p.out}) *x = {memory, int64_t(p.seqlen_q + p.seqlen_k) * p.nheads * 64, 64, 64};
        float lse;
        p.lse = &lse;
        const int32_t count = wgmma_batch_of_launch(p);
        if (!wgmma_copies_bias(p)) {
            EXPECT(wgmma_bias_copy(p).bytes() / p.batch > kSmallBiasCopy, "%d heads of %d x %d", p.nheads, p.seqlen_q, p.seqlen_k);
            continue;
        }
        int32_t next = 0;
        size_t most = 0;
        const bool fits = bias_copy_fits(p, wgmma_bias_copy(p));
        EXPECT(fits == (count == p.batch), "%d of %d sequences", count, p.batch);
        for_batch_pieces(p, count, [&](const AttentionParams& piece) {
            const int64_t first = next;
            EXPECT(piece.batch > 0 && piece.batch <= count && bias_copy_fits(piece, wgmma_bias_copy(piece)), "%d sequences", piece.batch);
            EXPECT(wgmma_copies_bias(piece) && wgmma_batch_of_launch(piece) == piece.batch, "a piece is a call like any");
            const auto places = [&](const void* x) { return static_cast<const uint8_t*>(x) - memory; };
            EXPECT(places(piece.q.data) == first * p.q.batch * 2 && places(piece.out.data) == first * p.out.batch * 2 &&
                       places(piece.k.data) == first * p.k.batch * 2 && places(piece.v.data) == first * p.v.batch * 2 &&
                       places(piece.mask.data) == first * pairs && places(piece.bias.data) == 0 &&
                       piece.lse - &lse == first * p.nheads * p.seqlen_q,
                   "from sequence %d on", next);
            most = std::max(most, bias_copy_bytes(wgmma_bias_copy(piece)));
            next += piece.batch;
            return 0;
        });
        EXPECT(next == p.batch, "%d of %d sequences", next, p.batch);
        const size_t memory_of_all =
            most_of_batch_pieces(p, count, [](const AttentionParams& piece) { return bias_copy_bytes(wgmma_bias_copy(piece)); });
        EXPECT(memory_of_all == most && (fits || most <= kSmallBiasCopy + kBiasCopyAlignment), "%zu bytes for %zu", memory_of_all, most);
    }
}

// Biases that the copy engine cannot load, and of which no copy is made, take the general plans.
void check_limits_of_tiles() {
    const auto expect = [](const char* what, bool wanted, const auto& change) {
        for (const int headdim : {64, 128, 256}) {
            AttentionParams p{};
            p.batch = 2, p.nheads = p.nheads_k = 4, p.group = 1, p.headdim = p.headdim_v = headdim, p.seqlen_q = 64, p.seqlen_k = 1 << 30;
            p.scale = 0.125f, p.window_left = p.window_right = -1, p.dtype = p.bias_dtype = DType::kBFloat16;
            p.bias = {reinterpret_cast<const void*>(uintptr_t(4096)), 0, 0, 0};
            change(p);
            const bool forward = wgmma_plan(wgmma_choose(p, 132)).bias, backward = backward_plan(backward_choose(p)).bias();
            EXPECT(forward == wanted && backward == wanted, "head dim %d, %s: forward %d, backward %d", headdim, what, forward, backward);
        }
    };
    expect("2^30 keys", true, [](AttentionParams&) {});
    expect("2^30 + 8 keys", true, [](AttentionParams& p) { p.seqlen_k += 8; });
    expect("float32, 2^30 keys", true, [](AttentionParams& p) { p.bias_dtype = DType::kFloat32; });
    expect("float32, 2^30 + 8 keys", false, [](AttentionParams& p) { p.bias_dtype = DType::kFloat32, p.seqlen_k += 8; });
    expect("a stride of 2^40 - 16 bytes", true, [](AttentionParams& p) { p.bias.batch = (int64_t(1) << 39) - 8; });
    expect("a stride of 2^40 bytes: a copy", true, [](AttentionParams& p) { p.bias.batch = int64_t(1) << 39; });
    expect("a stride of 2^40 bytes, more than 4 GiB to copy", false,
           [](AttentionParams& p) { p.bias.batch = int64_t(1) << 39, p.seqlen_k += 8; });
    expect("a stride of 2^63 bytes", false, [](AttentionParams& p) { p.bias.head = int64_t(1) << 62; });
    expect("float32, a stride of 2^40 bytes", false,
           [](AttentionParams& p) { p.bias_dtype = DType::kFloat32, p.bias.head = int64_t(1) << 38; });
}

}  // namespace

int main() {
    for (int i = 0; i < 3000; ++i) check_copy<uint16_t>(), check_copy<uint32_t>();
    check_choices();
    check_pieces();
    check_limits_of_tiles();
    if (failures) return std::printf("%d failures\n", failures), 1;
    std::printf("the copy of a bias is right\n");
    return 0;
}
