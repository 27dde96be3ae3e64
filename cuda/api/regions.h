// regions.h: what an array occupies in memory, to refuse outputs that would be written twice, or while something else is read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_attn.h"

namespace fa {

struct Axis {
    const char *name, *count;  // what a message calls its stride and its extent
    int64_t extent, stride;    // stride in elements
};

// An array of three strided axes and contiguous columns.
struct Region {
    const char* name;
    const void* data;
    Axis axes[3];
    int64_t columns;
    int64_t element;  // bytes

    bool empty() const { return columns == 0 || axes[0].extent == 0 || axes[1].extent == 0 || axes[2].extent == 0; }
    bool same_layout(const Region& other) const {
        for (int i = 0; i < 3; ++i)
            if (axes[i].extent != other.axes[i].extent || (axes[i].extent > 1 && axes[i].stride != other.axes[i].stride)) return false;
        return data == other.data && element == other.element;
    }
};

// `rows` and `batch` as the array's own shape has them: a varlen one has batch 1.
template <typename Tensor>
Region region(const char* name, const Tensor& t, int64_t batch, int64_t rows, int64_t heads, int64_t columns, size_t element) {
    return {name,
            t.data,
            {{"batch", "batch", batch, t.batch_stride}, {"row", "rows", rows, t.row_stride}, {"head", "nheads", heads, t.head_stride}},
            columns,
            int64_t(element)};
}
inline Region region(const char* name, const fa_matrix& t, int64_t rows, int64_t columns, size_t element) {
    return {
        name, t.data, {{"batch", "batch", 1, 0}, {"row", "rows", rows, t.row_stride}, {"head", "nheads", 1, 0}}, columns, int64_t(element)};
}
inline Region region(const char* name, const void* data, int64_t count, size_t element) {
    return {name, data, {{"batch", "batch", 1, 0}, {"row", "rows", 1, 0}, {"head", "nheads", 1, 0}}, count, int64_t(element)};
}

// An output has one place for each element. Every array that slicing, transposing and reshaping make of one passes: the axes nest, a step
// along one leads past all that those of smaller steps reach.
// Without an address, as in a query, only strides of 0 count.
fa_status check_output(const Region& output);

// Whether two arrays have an element in common. Exact for views of one array whose axes step alike, as q, k, v and out of one buffer do;
// an axis that steps differently counts as filled.
bool overlap(const Region& a, const Region& b);

// `in_place`: the same array is fine, element for element.
fa_status check_apart(const Region& output, const Region& other, bool in_place = false);

}  // namespace fa
