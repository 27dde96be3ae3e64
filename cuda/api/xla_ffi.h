// xla_ffi.h: the part of XLA's foreign function interface (openxla.org/xla/custom_call) that the handlers use. Its C ABI has not changed
// since version 0.1. It is declared here so that a build needs nothing of XLA. tests/attention/test_xla_ffi.py compares every offset and
// number with the header that comes with jaxlib.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fa::xla {

struct Error;             // opaque
struct ExecutionContext;  // opaque

struct Extension {
    size_t struct_size;
    int32_t type;  // only kMetadataExtension exists
    Extension* next;
};
constexpr int32_t kMetadataExtension = 1;

struct ApiVersion {
    size_t struct_size;
    Extension* extension;
    int32_t major, minor;
};

// Filled in by a handler when XLA registers it.
struct Metadata {
    size_t struct_size;
    ApiVersion version;
    uint32_t traits;
};
struct MetadataExtension {
    Extension base;
    Metadata* metadata;
};
constexpr uint32_t kCommandBufferCompatible = 1;  // the handler's work may be captured into a CUDA graph and replayed

enum ErrorCode : int32_t { kInvalidArgument = 3, kResourceExhausted = 8, kUnimplemented = 12, kInternal = 13 };
struct ErrorCreateArgs {
    size_t struct_size;
    Extension* extension;
    const char* message;
    ErrorCode code;
};

struct StreamGetArgs {
    size_t struct_size;
    Extension* extension;
    ExecutionContext* context;
    void* stream;  // out
};

struct Api {
    size_t struct_size;
    Extension* extension;
    ApiVersion version;
    const void* internal;
    Error* (*error_create)(ErrorCreateArgs*);
    void *error_message, *error_destroy, *handler_register;
    Error* (*stream_get)(StreamGetArgs*);
};

constexpr int32_t kInt32 = 4, kInt64 = 5;  // of XLA_FFI_DataType

struct Buffer {  // dense, row-major
    size_t struct_size;
    Extension* extension;
    int32_t dtype;
    void* data;
    int64_t rank;
    int64_t* dims;
};

struct Buffers {  // XLA_FFI_Args and XLA_FFI_Rets
    size_t struct_size;
    Extension* extension;
    int64_t size;
    int32_t* types;  // of each item; buffers are the only type
    Buffer** items;
};

struct ByteSpan {
    const char* text;  // not zero-terminated
    size_t length;
};
struct Array {
    int32_t dtype;
    size_t size;  // in elements
    void* data;
};

enum AttributeType : int32_t { kArrayAttribute = 1 };  // the value is an Array
struct Attributes {
    size_t struct_size;
    Extension* extension;
    int64_t size;
    AttributeType* types;
    ByteSpan** names;
    void** values;
};

constexpr int32_t kExecuteStage = 3;

struct CallFrame {
    size_t struct_size;
    Extension* extension;
    const Api* api;
    ExecutionContext* context;
    int32_t stage;
    Buffers arguments, results;
    Attributes attributes;
};

}  // namespace fa::xla
