#include "device/tensor_map.h"

#include <cstdio>
#include <string>

#include "device/driver.h"

namespace fa {
namespace {

DriverFunction<decltype(cuTensorMapEncodeTiled)> encoder("cuTensorMapEncodeTiled");
DriverFunction<decltype(cuGetErrorName)> error_name("cuGetErrorName");
DriverFunction<decltype(cuGetErrorString)> error_string("cuGetErrorString");

thread_local char failure[192] = "";

cudaError_t encoded(const char* name, const void* data, CUresult result) {
    if (result == CUDA_SUCCESS) return cudaSuccess;
    const char *code = nullptr, *text = nullptr;
    if (const auto name_of = error_name.get()) name_of(result, &code);
    if (const auto text_of = error_string.get()) text_of(result, &text);
    std::snprintf(failure, sizeof failure, "the tensor map of %s (data=%p): %s (%s)", name, data, text ? text : "the driver refused",
                  code ? code : std::to_string(int(result)).c_str());
    return cudaErrorInvalidValue;
}

}  // namespace

const char* tensor_map_failure() {
    thread_local char taken[sizeof failure];
    std::snprintf(taken, sizeof taken, "%s", failure);
    failure[0] = '\0';
    return taken;
}

cudaError_t encode_tiles(const TensorTiles& t, CUtensorMap* map, int* loads) {
    constexpr cuuint64_t kChunk = 64, kChunkBytes = 128;
    const auto encode = encoder.get();
    if (!encode) return cudaErrorNotSupported;
    // With the chunks as an axis, one copy fetches a whole tile; but then no column inside a chunk counts as out of bounds.
    const bool whole = t.box_chunks || (t.columns == t.padded_columns && !t.by_chunk);
    const cuuint64_t chunks = whole ? t.columns / kChunk : 1;
    // The stride of an axis with one element is never used, but has to be valid.
    const auto stride = [](int64_t extent, int64_t bytes) { return extent > 1 ? cuuint64_t(bytes) : kChunkBytes; };
    struct Axis {
        cuuint64_t extent, stride;
        cuuint32_t box;
    };
    const Axis rows{cuuint64_t(t.rows), stride(t.rows, t.row_stride), cuuint32_t(t.box_rows)},
        heads{cuuint64_t(t.heads), stride(t.heads, t.head_stride), t.box_heads ? cuuint32_t(t.box_heads) : 1},
        chunk{chunks, kChunkBytes, t.box_chunks ? cuuint32_t(t.box_chunks) : cuuint32_t(chunks)},
        batch{cuuint64_t(t.batch), stride(t.batch, t.batch_stride), 1};
    const Axis axes[4] = {t.box_heads ? heads : rows, t.box_heads ? rows : chunk, t.box_heads ? chunk : heads, batch};
    const cuuint64_t dims[5] = {whole ? kChunk : cuuint64_t(t.columns), axes[0].extent, axes[1].extent, axes[2].extent, axes[3].extent};
    const cuuint64_t strides[4] = {axes[0].stride, axes[1].stride, axes[2].stride, axes[3].stride};
    const cuuint32_t box[5] = {cuuint32_t(kChunk), axes[0].box, axes[1].box, axes[2].box, axes[3].box}, ones[5] = {1, 1, 1, 1, 1};
    *loads = whole ? 1 : int(t.padded_columns / int64_t(kChunk));
    const CUresult result = encode(map, t.half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
                                   const_cast<void*>(t.data), dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return encoded(t.name, t.data, result);
}

cudaError_t encode_words(const WordTiles& t, CUtensorMap* map) {
    const auto encode = encoder.get();
    if (!encode) return cudaErrorNotSupported;
    constexpr cuuint64_t kUnused = 16;
    const cuuint64_t dims[5] = {cuuint64_t(t.words), cuuint64_t(t.rows), 1, 1, 1};
    const cuuint64_t strides[4] = {cuuint64_t(t.row_stride), kUnused, kUnused, kUnused};
    const cuuint32_t box[5] = {cuuint32_t(t.box_words), cuuint32_t(t.box_rows), 1, 1, 1}, ones[5] = {1, 1, 1, 1, 1};
    const CUresult result =
        encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 5, const_cast<void*>(t.data), dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return encoded(t.name, t.data, result);
}

}  // namespace fa
