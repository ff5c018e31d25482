// Runs recorded calls of the native library on copies of the memory that they use, and writes what
// they made of it (crossed.py).
//
//     replay_calls LIBRARY ISA THREADS CALLS RESULTS
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <dlfcn.h>

namespace {

struct Region {
    int64_t address, size, has_addresses;
    std::vector<char> memory;
    char* at;

    // at an address with the same remainder by 64, and space around it
    void place() {
        memory.assign(size + 192, 0);
        const uintptr_t begin = (uintptr_t)memory.data() + 64;
        at = (char*)(begin + (uint64_t)(address - (int64_t)begin) % 64);
    }
};

std::vector<Region> regions;

void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

int64_t read_number(FILE* file) {
    int64_t number;
    if (std::fread(&number, 8, 1, file) != 1) fail("the file of calls is too short");
    return number;
}

// An address of the recording process, here; others and null are unchanged.
int64_t here(int64_t address) {
    for (const Region& r : regions)
        if (address >= r.address && address < r.address + r.size)
            return (int64_t)(r.at + (address - r.address));
    return address;
}
int64_t there(int64_t address) {
    for (const Region& r : regions)
        if (address >= (int64_t)r.at && address < (int64_t)r.at + r.size)
            return r.address + (address - (int64_t)r.at);
    return address;
}
void translate(int64_t (*to)(int64_t)) {
    for (const Region& r : regions)
        for (int64_t i = 0; r.has_addresses && i + 8 <= r.size; i += 8) {
            int64_t word;
            std::memcpy(&word, r.at + i, 8);
            word = to(word);
            std::memcpy(r.at + i, &word, 8);
        }
}

template <typename F>
F function(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (!found) fail(name);
    return (F)found;
}

}  // namespace

int main(int count, char** values) {
    if (count != 6) fail("LIBRARY ISA THREADS CALLS RESULTS");
    void* library = dlopen(values[1], RTLD_NOW);
    if (!library) fail(dlerror());
    const auto run =
        function<int32_t (*)(const void* const*, int32_t, const void*)>(library, "quire_run");
    const auto pack_linear =
        function<void (*)(const void*, int64_t, int32_t, int64_t, int64_t, void*)>(
            library, "quire_pack_linear");
    const auto pack_blocks =
        function<void (*)(const void*, int64_t, int64_t, const void*, void*, void*)>(
            library, "quire_pack_blocks");
    if (function<int32_t (*)(const char*)>(library, "quire_use_isa")(values[2]) != 0)
        fail("this processor does not have the instruction set");
    const int threads = std::atoi(values[3]);
    const std::vector<int32_t> cores(threads, -1);
    function<int32_t (*)(int32_t, const int32_t*)>(library, "quire_set_threads")(threads,
                                                                                 cores.data());
    FILE *calls = std::fopen(values[4], "rb"), *results = std::fopen(values[5], "wb");
    if (!calls || !results) fail("cannot open the files");
    for (int64_t left = read_number(calls); left > 0; left--) {
        const int64_t kind = read_number(calls);
        int64_t a[6];
        for (int64_t& argument : a) argument = read_number(calls);
        regions.clear();
        regions.resize(read_number(calls));
        for (Region& r : regions) {
            r.address = read_number(calls), r.size = read_number(calls);
            r.has_addresses = read_number(calls);
            r.place();
            if (r.size && std::fread(r.at, r.size, 1, calls) != 1) fail("too short a file");
        }
        translate(here);
        for (int64_t& argument : a) argument = here(argument);
        if (kind == 0) {
            const void* call = (const void*)a[0];
            if (run(&call, 1, (const void*)a[1]) != 0) fail("a call cannot run");
        } else if (kind == 1) {
            pack_linear((const void*)a[0], a[1], (int32_t)a[2], a[3], a[4], (void*)a[5]);
        } else {
            pack_blocks((const void*)a[0], a[1], a[2], (const void*)a[3], (void*)a[4], (void*)a[5]);
        }
        translate(there);
        for (const Region& r : regions)
            if (r.size && std::fwrite(r.at, r.size, 1, results) != 1) fail("cannot write");
    }
    return std::fclose(results) == 0 ? 0 : 1;
}
