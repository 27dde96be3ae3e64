// bias_chunk.h: what a thread of bias_copy.cu does: 16 bytes of the copy of a bias that bias_copy.h describes. For host and device, so that
// a test without a GPU can make a copy.
#pragma once

#include <cstdint>
#include <cstring>

#include "attention/common/bias_copy.h"
#include "common/divisor.h"

namespace fa {

template <typename Word>
FA_HOST_DEVICE Word load_word(const void* address) {
#if defined(__CUDA_ARCH__)
    return __ldg(static_cast<const Word*>(address));
#else
    Word word;
    std::memcpy(&word, address, sizeof word);
    return word;
#endif
}
struct alignas(kBiasChunkBytes) BiasChunk {
    uint32_t pair[4];  // the elements of two neighbouring keys each, the even key in the low half; in float32 of one key each
};
// 16 bytes from anywhere, by the widest loads that read nothing beside them.
FA_HOST_DEVICE BiasChunk load_bias_chunk(const char* bytes) {
    BiasChunk chunk;
    if (reinterpret_cast<uintptr_t>(bytes) % 4 == 0) {
        for (int x = 0; x < 4; ++x) chunk.pair[x] = load_word<uint32_t>(bytes + 4 * x);
        return chunk;
    }
    uint32_t before = load_word<uint16_t>(bytes);
    for (int x = 0; x < 4; ++x) {
        const uint32_t word = x < 3 ? load_word<uint32_t>(bytes + 2 + 4 * x) : load_word<uint16_t>(bytes + 14);
        chunk.pair[x] = before | word << 16;
        before = word >> 16;
    }
    return chunk;
}
// Chunk `place` of a row, from the bias alone, with zeros past the last key.
FA_HOST_DEVICE BiasChunk chunk_of_bias(const BiasCopy& copy, int32_t batch, int32_t head, int32_t row, int32_t place) {
    const bool wide = copy.elements == 4;  // float32
    const int32_t key = place * copy.elements, left = copy.keys - key;
    const int64_t first = batch * copy.bias.batch + head * copy.bias.head + row * copy.bias.row + key;
    const char* const from = static_cast<const char*>(copy.bias.data) + first * (wide ? 4 : 2);
    if (left >= copy.elements) return load_bias_chunk(from);
    BiasChunk chunk;
    for (int x = 0; x < 4; ++x) {
        if (wide) {
            chunk.pair[x] = x < left ? load_word<uint32_t>(from + 4 * x) : 0;
            continue;
        }
        const uint32_t low = 2 * x < left ? load_word<uint16_t>(from + 4 * x) : 0;
        chunk.pair[x] = low | (2 * x + 1 < left ? uint32_t(load_word<uint16_t>(from + 4 * x + 2)) << 16 : 0);
    }
    return chunk;
}
// Byte `low` twice, in the low half, and byte `high` twice.
FA_HOST_DEVICE uint32_t two_bytes(uint32_t bytes, int32_t low, int32_t high) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(bytes, 0, uint32_t(low) * 0x11 | uint32_t(high) * 0x1100);
#else
    return (bytes >> 8 * low & 0xFF) * 0x101 | (bytes >> 8 * high & 0xFF) * 0x1010000;
#endif
}
// The same with -inf where the mask hides a pair.
FA_HOST_DEVICE BiasChunk hide_in_chunk(const BiasCopy& copy, BiasChunk chunk, int32_t batch, int32_t head, int32_t row, int32_t place) {
    if (!copy.mask.data) return chunk;
    const bool wide = copy.elements == 4;  // float32
    const int32_t key = place * copy.elements, left = copy.keys - key;
    const uint8_t* const attend =
        static_cast<const uint8_t*>(copy.mask.data) + batch * copy.mask.batch + head * copy.mask.head + row * copy.mask.row + key;
    uint32_t sees[2] = {~0u, ~0u};  // a byte for each key; keys past the end keep their zero
    if (left >= copy.elements && reinterpret_cast<uintptr_t>(attend) % 4 == 0) {
        sees[0] = load_word<uint32_t>(attend);
        if (!wide) sees[1] = load_word<uint32_t>(attend + 4);
    } else {
        for (int x = 0; x < 8; ++x)
            if (x < left && x < copy.elements && load_word<uint8_t>(attend + x) == 0) sees[x / 4] &= ~(0xFFu << x % 4 * 8);
    }
    for (uint32_t& four : sees) {  // all bits of the bytes that are not zero
        four |= (four & 0x7F7F7F7Fu) + 0x7F7F7F7Fu;
        four = (four >> 7 & 0x01010101u) * 0xFF;
    }
    for (int y = 0; y < 4; ++y) {
        const uint32_t seen = wide ? two_bytes(sees[0], y, y) : two_bytes(sees[y / 2], y % 2 * 2, y % 2 * 2 + 1);
        chunk.pair[y] = (chunk.pair[y] & seen) | (copy.hidden & ~seen);
    }
    return chunk;
}

// ---- the work of a thread: a chunk of the bias, in the copies of all sequences that share it ----

// Neighbouring threads have the chunks of a row, then those of the row in the other heads, which may share the row of a mask.
struct BiasCopyWork {
    Divisor chunks, heads, rows;
    int32_t together;  // sequences that share the bias: all of them, where masks alone differ
};
inline int32_t sequences_of_bias(const BiasCopy& copy) {
    return copy.bias.data && copy.bias.batch == 0 && copy.batches > 1 ? copy.batches : 1;
}
inline int64_t bias_copy_threads(const BiasCopy& copy) { return copy.all_rows() / sequences_of_bias(copy) * copy.chunks(); }
inline BiasCopyWork bias_copy_work(const BiasCopy& copy) {  // of a copy that is not empty
    return {divisor_of(copy.chunks()), divisor_of(copy.heads), divisor_of(copy.rows), sequences_of_bias(copy)};
}
FA_HOST_DEVICE void copy_bias_chunk(const BiasCopy& copy, const BiasCopyWork& work, int32_t thread, BiasChunk* to) {
    static_assert(kMostBiasCopy / kBiasChunkBytes <= 1 << 28, "the number of a chunk is an int");
    const int32_t line = work.chunks.divide(thread), place = work.chunks.remainder(thread, line);
    const int32_t all_rows = work.heads.divide(line), head = work.heads.remainder(line, all_rows);
    const int32_t first = work.rows.divide(all_rows), row = work.rows.remainder(all_rows, first);
    if (first * work.together >= copy.batches) return;
    BiasChunk chunk{};
    if (copy.bias.data) chunk = chunk_of_bias(copy, first, head, row, place);
    const int32_t of_head = copy.rows * copy.chunks(), of_batch = copy.heads * of_head;
    to += first * of_batch + head * of_head + row * copy.chunks() + place;
#pragma unroll 4
    for (int32_t batch = first; batch < first + work.together; ++batch, to += of_batch)
        *to = hide_in_chunk(copy, chunk, batch, head, row, place);
}

}  // namespace fa
