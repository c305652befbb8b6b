// Calls a function of the library with memory of another process, and returns what became of it.
//
// Read from stdin, numbers of 64 bits: the length of the function's name and the name; the number of
// arguments and each; the number of blocks of memory and of each its address there, its bytes,
// whether it holds addresses, and its content. Addresses into blocks, in arguments and in blocks
// that hold them, are replaced by where the blocks lie here. Written to stdout: the result and the
// content of each block, with addresses as they were.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

namespace {

struct MemoryBlock {
    uint64_t there, size, holds_addresses, here;
    char* content() const { return reinterpret_cast<char*>(here); }
};

void read_into(void* place, size_t size) {
    if (fread(place, 1, size, stdin) != size) exit(2);
}

uint64_t read_number() {
    uint64_t value;
    read_into(&value, sizeof value);
    return value;
}

void write_from(const void* place, size_t size) {
    if (fwrite(place, 1, size, stdout) != size) exit(2);
}

uint64_t moved(const std::vector<MemoryBlock>& blocks, uint64_t value, bool is_back) {
    for (const MemoryBlock& block : blocks) {
        const uint64_t from = is_back ? block.here : block.there;
        const uint64_t to = is_back ? block.there : block.here;
        if (value >= from && value - from < block.size) return value - from + to;
    }
    return value;
}

void move_addresses(const std::vector<MemoryBlock>& blocks, bool is_back) {
    for (const MemoryBlock& block : blocks) {
        if (!block.holds_addresses) continue;
        for (uint64_t at = 0; at + 8 <= block.size; at += 8) {
            uint64_t value;
            memcpy(&value, block.content() + at, sizeof value);
            value = moved(blocks, value, is_back);
            memcpy(block.content() + at, &value, sizeof value);
        }
    }
}

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 3;
    std::string name(read_number(), ' ');
    read_into(&name[0], name.size());
    uint64_t given[8] = {};
    const uint64_t num_given = read_number();
    if (num_given > 8) return 4;
    for (uint64_t each = 0; each < num_given; ++each) given[each] = read_number();
    std::vector<MemoryBlock> blocks(read_number());
    for (MemoryBlock& block : blocks) {
        block.there = read_number();
        block.size = read_number();
        block.holds_addresses = read_number();
        // As aligned as it is there, with a line to spare.
        void* memory = aligned_alloc(64, (block.size + 128) / 64 * 64);
        block.here = reinterpret_cast<uint64_t>(memory) + block.there % 64;
        read_into(block.content(), block.size);
    }
    move_addresses(blocks, false);
    for (uint64_t& each : given) each = moved(blocks, each, false);
    using Function = int64_t (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                                 uint64_t, uint64_t);
    const Function function = reinterpret_cast<Function>(dlsym(library, name.c_str()));
    if (!function) return fprintf(stderr, "there is no %s\n", name.c_str()), 3;
    const int64_t result = function(given[0], given[1], given[2], given[3], given[4], given[5],
                                    given[6], given[7]);
    move_addresses(blocks, true);
    write_from(&result, sizeof result);
    for (const MemoryBlock& block : blocks) write_from(block.content(), block.size);
    return 0;
}
