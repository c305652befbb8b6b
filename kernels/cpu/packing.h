// Packing of weights in groups into panels, by families that differ in their units alone.
#pragma once

#include <string.h>

#include "grouped.h"
#include "parallel.h"

namespace outrider {

template <class Product>
struct Packing {
    const Product& product;
    const uint8_t* codes;  // [out_features, in_features]
    const char* scales;    // [out_features, groups], of the product's type
    const int16_t* zeros;  // likewise, or null
    const char* minimums;  // likewise, of the product's type, or null
    // Lays the codes of a group into a panel's units, behind its header.
    void (*pack_group)(const Product& product, const uint8_t* codes, int64_t column, char* units);
    char* panels;
    Tickets tickets;
};

template <class Product>
void pack_header(const Packing<Product>& packing, int64_t row, int64_t column, int64_t group,
                 char* place) {
    const Product& product = packing.product;
    const int64_t size = product.scale_bytes() / kPanelColumns;
    const int64_t from = row * product.groups() + group;
    memcpy(place + column * size, packing.scales + from * size, size_t(size));
    place += product.scale_bytes();
    if (product.has_zeros) memcpy(place + column * 2, packing.zeros + from, 2);
    place += product.zero_bytes();
    if (product.has_minimums) {
        memcpy(place + column * size, packing.minimums + from * size, size_t(size));
    }
}

template <class Product>
void pack_panels(void* data) {
    Packing<Product>& packing = *static_cast<Packing<Product>*>(data);
    const Product& product = packing.product;
    for (int64_t panel; (panel = packing.tickets.take()) < packing.tickets.count;) {
        char* place = packing.panels + panel * product.panel_bytes();
        memset(place, 0, size_t(product.panel_bytes()));
        const int64_t first = panel * kPanelColumns, left = product.out_features - first;
        for (int64_t column = 0; column < kPanelColumns && column < left; ++column) {
            const int64_t row = first + column;
            const uint8_t* codes = packing.codes + row * product.in_features;
            for (int64_t group = 0; group < product.groups(); ++group) {
                char* header = place + group * product.group_bytes();
                pack_header(packing, row, column, group, header);
                packing.pack_group(product, codes + group * product.group_size, column,
                                   header + product.header_bytes());
            }
        }
    }
}

}  // namespace outrider
