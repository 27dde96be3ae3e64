// regions.h: the memory that an array occupies. Serves to refuse outputs that overlap themselves or an array that is in use.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_attn.h"

namespace fa {

struct Axis {
    const char *name, *count;  // how messages name the stride and the extent
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

// `batch` and `rows` describe the array's own shape: a varlen array has batch 1.
template <typename Tensor>
Region region(const char* name, const Tensor& t, int64_t batch, int64_t rows, int64_t heads, int64_t columns, size_t element) {
    return {name,
            t.data,
            {{"batch", "batch", batch, t.batch_stride}, {"row", "rows", rows, t.row_stride}, {"head", "nheads", heads, t.head_stride}},
            columns,
            int64_t(element)};
}
inline Region region(const char* name, const void* data, int64_t count, size_t element) {
    return {name, data, {{"batch", "batch", 1, 0}, {"row", "rows", 1, 0}, {"head", "nheads", 1, 0}}, count, int64_t(element)};
}

// A list of arrays of one call. add() ignores arrays that are NULL or empty.
template <int kMost>
class Regions {
public:
    void add(const Region& r) {
        if (r.data && !r.empty()) items_[count_++] = r;
    }
    const Region* begin() const { return items_; }
    const Region* end() const { return items_ + count_; }

private:
    Region items_[kMost];
    int count_ = 0;
};

// Every element of an output must have its own place. The check is that the axes nest: a step along an axis leads past everything that the
// axes of smaller steps reach. Every array made by slicing, transposing or reshaping a contiguous array passes. In a query without
// addresses only strides of 0 are refused.
fa_status check_output(const Region& output);

// Whether two arrays have an element in common. The answer is exact for views of one array whose axes have equal steps, such as q, k, v and
// out in one buffer, and for broadcast axes (step 0). An axis whose steps differ counts as filled without gaps.
bool overlap(const Region& a, const Region& b);

// Refuses an output that overlaps the other array. With `in_place` both may be the same array with the same layout.
fa_status check_apart(const Region& output, const Region& other, bool in_place = false);

// Refuses an output that overlaps an array which the call reads, or a previous output.
template <int kOutputs, int kInputs>
fa_status check_apart(const Regions<kOutputs>& outputs, const Regions<kInputs>& inputs) {
    for (const Region& output : outputs) {
        for (const Region& input : inputs)
            if (const fa_status status = check_apart(output, input); status != FA_OK) return status;
        for (const Region* other = outputs.begin(); other != &output; ++other)
            if (const fa_status status = check_apart(output, *other); status != FA_OK) return status;
    }
    return FA_OK;
}

}  // namespace fa
