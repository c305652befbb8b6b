// Packing and the C functions that Python calls.
#include "products.h"

#include <string.h>

#include <new>

#include "calls.h"
#include "parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace outrider {
namespace {

// Raised with every change of the functions or structures below.
constexpr int32_t kVersion = 21;
constexpr size_t kHugePageBytes = size_t(2) << 20;

int64_t row_bytes_of(int32_t kind, int64_t in_features) {
    return kind == kInt8 ? in_features : 2 * in_features;
}

// ---- packing --------------------------------------------------------------------------------

// packed[step][row] = the step's 4 bytes of that row; rows of `row_bytes` bytes, the last step
// filled up with zeros. `packed_rows`: rows of the result, of which `rows` are written.
void transpose_steps(const char* x, int64_t row_bytes, int64_t rows, int64_t packed_rows,
                     char* packed) {
    const int64_t whole = row_bytes / kStepBytes;
    const int64_t stride = packed_rows * kStepBytes;
    int64_t row = 0;
#if defined(__x86_64__)
    for (; row + 4 <= rows; row += 4) {
        const char* from = x + row * row_bytes;
        char* to = packed + row * kStepBytes;
        int64_t step = 0;
        for (; step + 4 <= whole; step += 4, from += 16, to += 4 * stride) {
            __m128 a = _mm_loadu_ps(reinterpret_cast<const float*>(from));
            __m128 b = _mm_loadu_ps(reinterpret_cast<const float*>(from + row_bytes));
            __m128 c = _mm_loadu_ps(reinterpret_cast<const float*>(from + 2 * row_bytes));
            __m128 d = _mm_loadu_ps(reinterpret_cast<const float*>(from + 3 * row_bytes));
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(reinterpret_cast<float*>(to), a);
            _mm_storeu_ps(reinterpret_cast<float*>(to + stride), b);
            _mm_storeu_ps(reinterpret_cast<float*>(to + 2 * stride), c);
            _mm_storeu_ps(reinterpret_cast<float*>(to + 3 * stride), d);
        }
        for (; step < whole; ++step, from += 4, to += stride) {
            for (int each = 0; each < 4; ++each) {
                memcpy(to + 4 * each, from + each * row_bytes, kStepBytes);
            }
        }
    }
#endif
    for (int64_t each = row; each < rows; ++each) {
        const char* from = x + each * row_bytes;
        for (int64_t step = 0; step < whole; ++step) {
            memcpy(packed + step * stride + each * kStepBytes, from + step * kStepBytes,
                   kStepBytes);
        }
    }
    const int64_t rest = row_bytes % kStepBytes;
    if (!rest) return;
    for (int64_t each = 0; each < rows; ++each) {
        char* last = packed + whole * stride + each * kStepBytes;
        memset(last, 0, kStepBytes);
        memcpy(last, x + each * row_bytes + whole * kStepBytes, size_t(rest));
    }
}

struct Packing {
    const char* weight;
    int64_t out_features, row_bytes, steps;
    char* panels;
    Tickets tickets;
};

void pack_panels(void* data) {
    Packing& packing = *static_cast<Packing*>(data);
    for (int64_t panel; (panel = packing.tickets.take()) < packing.tickets.count;) {
        const int64_t first = panel * kPanelColumns;
        const int64_t left = packing.out_features - first;
        const int64_t columns = left < kPanelColumns ? left : kPanelColumns;
        char* place = packing.panels + panel * packing.steps * kPanelStepBytes;
        if (columns < kPanelColumns) memset(place, 0, size_t(packing.steps * kPanelStepBytes));
        transpose_steps(packing.weight + first * packing.row_bytes, packing.row_bytes, columns,
                        kPanelColumns, place);
    }
}

void advise_huge_pages(char* start, int64_t num_bytes) {
#if defined(__linux__)
    const uintptr_t mask = kHugePageBytes - 1;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + mask) & ~mask;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(start) + uintptr_t(num_bytes)) & ~mask;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)start;
    (void)num_bytes;
#endif
}

// ---- the product ----------------------------------------------------------------------------

struct Call {
    const Product& product;
    const Kernels& kernels;
    int64_t num_rows, steps;
    const uint16_t* x;
    const char* rows;  // [groups][steps][rows of the group][4 bytes], chunk after chunk
    char* packed;      // where these are to be; null where x is as they would be
    uint8_t* quantised;  // int8: [rows, in_features]
    float* row_scales;
    uint16_t* y;
    Tickets chunks, panels;
};

// Multiplies a chunk of rows with a panel; `next`: the panel that follows, or null.
void multiply_chunk(const Call& call, int64_t first_row, int64_t rows, const char* panel,
                    const char* next, void* sums) {
    const Groups groups(rows, call.kernels.max_group_rows);
    memset(sums, 0, size_t(rows * kPanelStepBytes));
    const char* chunk = call.rows + first_row * call.steps * kStepBytes;
    for (int64_t step = 0; step < call.steps; step += kBlockSteps) {
        const int64_t left = call.steps - step;
        const int64_t steps = left < kBlockSteps ? left : kBlockSteps;
        const char* weights = panel + step * kPanelStepBytes;
        const char* ahead = left > kBlockSteps ? weights + steps * kPanelStepBytes : next;
        // Groups share the work of fetching what is wanted next.
        const int64_t share = ahead ? ceil_div(kPanelStepBytes, groups.count) : 0;
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t start = groups.start(group), size = groups.size(group);
            Block block;
            block.weights = weights;
            block.rows = chunk + (start * call.steps + step * size) * kStepBytes;
            block.prefetch = ahead ? ahead + group * share * steps : weights;
            block.prefetch_stride = share;
            block.steps = steps;
            block.sums = static_cast<char*>(sums) + start * kPanelStepBytes;
            call.kernels.multiply[size - 1](block);
        }
    }
}

void finish_chunk(const Call& call, int64_t first_row, int64_t rows, int64_t panel,
                  const void* sums) {
    const Product& product = call.product;
    const int64_t first = panel * kPanelColumns;
    const int64_t left = product.out_features - first;
    Outputs outputs;
    outputs.sums = sums;
    outputs.rows = rows;
    outputs.columns = left < kPanelColumns ? left : kPanelColumns;
    outputs.bias = product.bias ? product.bias + first : nullptr;
    outputs.scales = product.scales ? product.scales + first : nullptr;
    outputs.totals = product.totals ? product.totals + first : nullptr;
    outputs.row_scales = call.row_scales ? call.row_scales + first_row : nullptr;
    outputs.y = call.y + first_row * product.out_features + first;
    outputs.y_stride = product.out_features;
    call.kernels.finish(outputs);
}

void multiply_panels(void* data) {
    Call& call = *static_cast<Call*>(data);
    alignas(kAlignment) char sums[kChunkRows * kPanelStepBytes];
    const int64_t panel_bytes = call.steps * kPanelStepBytes;
    int64_t panel = call.panels.take();
    while (panel < call.panels.count) {
        const int64_t next = call.panels.take();
        const char* weights = call.product.panels + panel * panel_bytes;
        for (int64_t row = 0; row < call.num_rows; row += kChunkRows) {
            const int64_t left = call.num_rows - row;
            const int64_t rows = left < kChunkRows ? left : kChunkRows;
            const char* ahead = left > kChunkRows ? weights
                                : next < call.panels.count
                                    ? call.product.panels + next * panel_bytes
                                    : nullptr;
            multiply_chunk(call, row, rows, weights, ahead, sums);
            finish_chunk(call, row, rows, panel, sums);
        }
        panel = next;
    }
}

}  // namespace

void pack_rows(const char* x, int64_t row_bytes, int64_t num_rows, int64_t steps,
               int64_t max_group_rows, char* packed) {
    for (int64_t chunk = 0; chunk < num_rows; chunk += kChunkRows) {
        const int64_t left = num_rows - chunk;
        const Groups groups(left < kChunkRows ? left : kChunkRows, max_group_rows);
        for (int64_t group = 0; group < groups.count; ++group) {
            const int64_t first = chunk + groups.start(group), size = groups.size(group);
            transpose_steps(x + first * row_bytes, row_bytes, size, size,
                            packed + first * steps * kStepBytes);
        }
    }
}

namespace {

// Packs a chunk of rows; before, they are quantised where that is wanted.
void pack_chunk(Call& call, int64_t chunk) {
    const Product& product = call.product;
    const int64_t row_bytes = row_bytes_of(product.kind, product.in_features);
    const char* from = reinterpret_cast<const char*>(call.x);
    const int64_t left = call.num_rows - chunk, rows = left < kChunkRows ? left : kChunkRows;
    if (call.quantised) {
        for (int64_t row = chunk; row < chunk + rows; ++row) {
            call.row_scales[row] =
                call.kernels.quantise(call.x + row * product.in_features, product.in_features,
                                      call.quantised + row * row_bytes);
        }
        from = reinterpret_cast<const char*>(call.quantised);
    }
    pack_rows(from + chunk * row_bytes, row_bytes, rows, call.steps, call.kernels.max_group_rows,
              call.packed + chunk * call.steps * kStepBytes);
}

void pack_chunks(void* data) {
    Call& call = *static_cast<Call*>(data);
    for (int64_t chunk; (chunk = call.chunks.take()) < call.chunks.count;) {
        pack_chunk(call, chunk * kChunkRows);
    }
}

// What a call of a product lays into its memory, piece after piece.
struct Pieces {
    Pieces(const Product& product, int64_t rows)
        : row_bytes(row_bytes_of(product.kind, product.in_features)),
          steps(ceil_div(row_bytes, kStepBytes)),
          is_int8(product.kind == kInt8),
          is_ready(!is_int8 && rows == 1 && row_bytes % kStepBytes == 0),
          packed(is_ready ? 0 : aligned(rows * steps * kStepBytes)),
          quantised(is_int8 ? aligned(rows * row_bytes) : 0),
          scales(is_int8 ? aligned(rows * int64_t(sizeof(float))) : 0) {}
    const int64_t row_bytes, steps;
    const bool is_int8, is_ready;
    const int64_t packed, quantised, scales;  // bytes
};

struct CallList {
    const ProductCall* calls;
    int64_t count;
};

void pack_list(void* data) {
    const CallList& list = *static_cast<CallList*>(data);
    for (int64_t each = 0; each < list.count; ++each) list.calls[each].pack(list.calls[each].data);
}

void multiply_list(void* data) {
    const CallList& list = *static_cast<CallList*>(data);
    for (int64_t each = 0; each < list.count; ++each) {
        list.calls[each].multiply(list.calls[each].data);
    }
}

// A thread more for so many bytes of rows: packing them takes about what waking it does.
constexpr int64_t kPackBytesPerThread = 64 << 10;

// Several products of one type, each with rows of its own that lie behind those of the one before.
template <class AnyProduct>
int32_t multiply_all(const void* const* products, const int64_t* rows, int64_t count,
                     const uint16_t* x, uint16_t* y, int64_t threads) {
    const auto product = [&](int64_t each) -> const AnyProduct& {
        return *static_cast<const AnyProduct*>(products[each]);
    };
    const int64_t list_bytes = aligned(count * int64_t(sizeof(ProductCall)));
    int64_t num_bytes = list_bytes;
    for (int64_t each = 0; each < count; ++each) {
        const int64_t own = call_bytes(product(each), rows[each]);
        if (own < 0) return -1;
        num_bytes += own;
    }
    Scratch scratch(num_bytes);
    if (!scratch.data()) return -1;
    ProductCall* calls = reinterpret_cast<ProductCall*>(scratch.data());
    char* memory = scratch.data() + list_bytes;
    for (int64_t each = 0; each < count; ++each) {
        calls[each] = prepare(product(each), x, rows[each], y, memory);
        memory += call_bytes(product(each), rows[each]);
        x += rows[each] * product(each).in_features;
        y += rows[each] * product(each).out_features;
    }
    CallList list{calls, count};
    int64_t pack_bytes = 0;
    for (int64_t each = 0; each < count; ++each) pack_bytes += calls[each].pack_bytes;
    const int64_t packers = 1 + pack_bytes / kPackBytesPerThread;
    if (pack_bytes) run_parallel(pack_list, &list, packers < threads ? packers : threads);
    run_parallel(multiply_list, &list, threads);
    return 0;
}

}  // namespace

int64_t call_bytes(const Product& product, int64_t rows) {
    if (!kernels_of(product.kind, product.instruction_set)) return -1;
    const Pieces pieces(product, rows);
    return aligned(sizeof(Call)) + pieces.packed + pieces.quantised + pieces.scales;
}

ProductCall prepare(const Product& product, const uint16_t* x, int64_t rows, uint16_t* y,
                    char* memory) {
    const Kernels& kernels = *kernels_of(product.kind, product.instruction_set);
    const Pieces pieces(product, rows);
    char* packed = memory + aligned(sizeof(Call));
    char* quantised = packed + pieces.packed;
    char* scales = quantised + pieces.quantised;
    Call* call = new (memory) Call{product,
                                   kernels,
                                   rows,
                                   pieces.steps,
                                   x,
                                   pieces.is_ready ? reinterpret_cast<const char*>(x) : packed,
                                   packed,
                                   pieces.is_int8 ? reinterpret_cast<uint8_t*>(quantised) : nullptr,
                                   pieces.is_int8 ? reinterpret_cast<float*>(scales) : nullptr,
                                   y,
                                   Tickets(pieces.is_ready ? 0 : ceil_div(rows, kChunkRows)),
                                   Tickets(ceil_div(product.out_features, kPanelColumns))};
    return {pack_chunks, multiply_panels, call, pieces.packed};
}

int32_t multiply_each(int32_t kind, const void* const* products, const int64_t* rows,
                      int64_t count, const uint16_t* x, uint16_t* y, int64_t threads) {
    return kind == kGrouped ? multiply_all<GroupedProduct>(products, rows, count, x, y, threads)
                         : multiply_all<Product>(products, rows, count, x, y, threads);
}

}  // namespace outrider

// ---- for Python -----------------------------------------------------------------------------

using namespace outrider;

EXPORT int32_t outrider_products_version() { return kVersion; }

EXPORT int64_t outrider_packed_bytes(int32_t kind, int64_t out_features, int64_t in_features) {
    return ceil_div(out_features, kPanelColumns) * kPanelStepBytes *
           ceil_div(row_bytes_of(kind, in_features), kStepBytes);
}

// weight: [out_features, in_features], contiguous; panels: outrider_packed_bytes, aligned to 64.
EXPORT void outrider_pack(int32_t kind, const char* weight, int64_t out_features,
                          int64_t in_features, char* panels, int32_t threads) {
    const int64_t row_bytes = row_bytes_of(kind, in_features);
    const int64_t steps = ceil_div(row_bytes, kStepBytes);
    const int64_t count = ceil_div(out_features, kPanelColumns);
    advise_huge_pages(panels, count * steps * kPanelStepBytes);
    Packing packing{weight, out_features, row_bytes, steps, panels, Tickets(count)};
    run_parallel(pack_panels, &packing, threads);
}

// y = x @ weight.T + bias; x: bfloat16 [rows, in_features], y: bfloat16 [rows, out_features], both
// contiguous. Returns 0, or -1 where memory is short or the instruction set is not known.
EXPORT int32_t outrider_multiply(const Product* product, const uint16_t* x, int64_t rows,
                                 uint16_t* y, int32_t threads) {
    const void* one = product;
    return multiply_each(product->kind, &one, &rows, 1, x, y, threads);
}

// As outrider_multiply with a GroupedProduct.
EXPORT int32_t outrider_grouped_multiply(const GroupedProduct* product, const uint16_t* x, int64_t rows,
                                      uint16_t* y, int32_t threads) {
    const void* one = product;
    return multiply_each(kGrouped, &one, &rows, 1, x, y, threads);
}
